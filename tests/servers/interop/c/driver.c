/*
 * Makes one call after the other, as a transaction manager and its programs do, in threads with names.
 *
 *   driver LIBRARY GETTER local|global
 *
 * It loads LIBRARY and gets the switch from GETTER: with local as Enduro/X does, with global as LIXA does. Each line of
 * its input is "thread call arguments"; each answer "thread code values". A thread starts with its first line. Flags
 * are hexadecimal. An xid is format:gtrid:bqual, the last two in hexadecimal; "null" is a null pointer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "dtx_xa.h"

#define LINE 65536
#define WORDS 8
#define MOST_THREADS 64

struct worker {
    char name[32];
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char line[LINE];
    int full;
};

static struct worker workers[MOST_THREADS];
static int count;
static void *library;
static struct xa_switch_t *xa;
static pthread_mutex_t speaking = PTHREAD_MUTEX_INITIALIZER;

static int (*publish)(const char *, const char *, const void *, size_t, const struct dtx_properties *);
static int (*get)(const char *, void *, size_t, struct dtx_message *);
static int (*header)(uint64_t, const char *, char *, size_t);
static int (*ack)(uint64_t);
static int (*reject)(uint64_t, int);
static int (*use)(int);
static const char *(*reason)(void);

static void *found(const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return symbol;
}

static long octets(const char *hex, size_t length, char *into)
{
    for (size_t at = 0; at + 1 < length; at += 2) {
        unsigned value;
        sscanf(hex + at, "%2x", &value);
        into[at / 2] = (char)value;
    }
    return (long)(length / 2);
}

static XID *read_xid(const char *text, XID *xid)
{
    if (!strcmp(text, "null"))
        return NULL;
    memset(xid, 0xEE, sizeof *xid); /* the switch must not use bytes after gtrid and bqual */
    xid->formatID = strtol(text, NULL, 10);
    const char *gtrid = strchr(text, ':') + 1;
    const char *bqual = strchr(gtrid, ':') + 1;
    char both[2 * LINE];
    xid->gtrid_length = octets(gtrid, (size_t)(bqual - 1 - gtrid), both);
    xid->bqual_length = octets(bqual, strlen(bqual), both + xid->gtrid_length);
    long length = xid->gtrid_length + xid->bqual_length;
    memcpy(xid->data, both, (size_t)(length > XIDDATASIZE ? XIDDATASIZE : length));
    return xid;
}

static void print_xid(FILE *out, const XID *xid)
{
    fprintf(out, " %ld:", xid->formatID);
    for (long at = 0; at < xid->gtrid_length + xid->bqual_length; at++)
        fprintf(out, at == xid->gtrid_length ? ":%02x" : "%02x", (unsigned char)xid->data[at]);
    if (xid->bqual_length == 0)
        fprintf(out, ":");
}

/* -- many threads at once ------------------------------------------------------------------------------------------ */

struct member {
    pthread_t thread;
    int number;
    int branches;
    const char *how;
    const char *queue;
    char *info;
    const char *gtrid;
    int code;
    const char *where;
    char why[512];
};

#define DO(name, call)                                                                                                \
    do {                                                                                                              \
        if ((self->code = (call)) != XA_OK) {                                                                         \
            self->where = name;                                                                                       \
            snprintf(self->why, sizeof self->why, "%s", reason());                                                    \
            return NULL;                                                                                              \
        }                                                                                                             \
    } while (0)

static void *member(void *argument)
{
    struct member *self = argument;
    DO("open", xa->xa_open_entry(self->info, 7, TMNOFLAGS));
    for (int number = 0; number < self->branches; number++) {
        XID xid;
        char body[64];
        memset(&xid, 0, sizeof xid);
        xid.formatID = 77;
        xid.gtrid_length = snprintf(xid.data, 64, "%s %d %d", self->gtrid, self->number, number);
        xid.bqual_length = snprintf(xid.data + xid.gtrid_length, 64, "c");
        DO("start", xa->xa_start_entry(&xid, 7, TMNOFLAGS));
        snprintf(body, sizeof body, "%d-%d", self->number, number);
        DO("publish", publish("", self->queue, body, strlen(body), NULL));
        DO("end", xa->xa_end_entry(&xid, 7, TMSUCCESS));
        if (!strcmp(self->how, "one")) {
            DO("commit", xa->xa_commit_entry(&xid, 7, TMONEPHASE));
        } else {
            DO("prepare", xa->xa_prepare_entry(&xid, 7, TMNOFLAGS));
            if (!strcmp(self->how, "prepare"))
                continue;
            if (!strcmp(self->how, "mixed") && number % 2)
                DO("rollback", xa->xa_rollback_entry(&xid, 7, TMNOFLAGS));
            else
                DO("commit", xa->xa_commit_entry(&xid, 7, TMNOFLAGS));
        }
    }
    DO("close", xa->xa_close_entry("", 7, TMNOFLAGS));
    return NULL;
}

/* crowd HOW THREADS BRANCHES QUEUE GTRID INFO: the code of the first call that failed, else 0 and seconds */
static int crowd(char **word, FILE *out)
{
    int threads = atoi(word[3]);
    struct member *members = calloc((size_t)threads, sizeof *members);
    struct timespec begun, ended;
    int code = XA_OK;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int number = 0; number < threads; number++) {
        struct member *one = members + number;
        *one = (struct member){.number = number, .branches = atoi(word[4]), .how = word[2], .queue = word[5],
                               .gtrid = word[6], .info = word[7]};
        pthread_create(&one->thread, NULL, member, one);
    }
    for (int number = 0; number < threads; number++) {
        struct member *one = members + number;
        pthread_join(one->thread, NULL);
        if (one->code != XA_OK && code == XA_OK) {
            code = one->code;
            fprintf(out, " %s %s", one->where, one->why);
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    if (code == XA_OK)
        fprintf(out, " %.6f", (double)(ended.tv_sec - begun.tv_sec) + 1e-9 * (double)(ended.tv_nsec - begun.tv_nsec));
    free(members);
    return code;
}

/* -- one call ------------------------------------------------------------------------------------------------------ */

/* Makes a call in a forked child. */
static int forked(char **word)
{
    XID xid;
    pid_t child = fork();
    if (child == 0) {
        int code = !strcmp(word[2], "open")     ? xa->xa_open_entry(word[5], atoi(word[4]), TMNOFLAGS)
                   : !strcmp(word[2], "commit") ? xa->xa_commit_entry(read_xid(word[3], &xid), atoi(word[4]), TMNOFLAGS)
                                                : xa->xa_start_entry(read_xid(word[3], &xid), atoi(word[4]), TMNOFLAGS);
        _exit(code & 0x7f);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? -(128 - WEXITSTATUS(status)) : 1000;
}

static int recovered(char **word, FILE *out)
{
    long room = strtol(word[2], NULL, 10);
    XID *xids = room > 0 ? calloc((size_t)room + 1, sizeof *xids) : NULL;
    if (xids)
        xids[room].formatID = -99; /* the switch must not write here */
    int code = xa->xa_recover_entry(room == 9999 ? NULL : xids, room, atoi(word[3]), strtol(word[4], NULL, 16));
    for (int at = 0; at < code && at < room; at++)
        print_xid(out, xids + at);
    if (xids && xids[room].formatID != -99)
        fprintf(out, " OVERRUN");
    free(xids);
    return code;
}

static int taken(char **word, FILE *out)
{
    size_t room = strtoul(word[3], NULL, 10);
    char *buffer = malloc(room + 1);
    struct dtx_message message;
    memset(&message, 0xEE, sizeof message);
    buffer[room] = '!';
    int code = get(word[2], buffer, room, &message);
    if (code == XA_OK)
        fprintf(out, " %lu %.*s", (unsigned long)message.delivery_tag, (int)message.length, buffer);
    if (code == XA_OK && !strcmp(word[4], "properties"))
        fprintf(out, " %d %s %s %s %s %s %s %s %s %s %s %ld", message.redelivered, message.exchange,
                message.routing_key, message.content_type, message.message_id, message.correlation_id, message.reply_to,
                message.type, message.content_encoding, message.app_id, message.user_id, (long)message.timestamp);
    if (code == DTX_TRUNCATED)
        fprintf(out, " %zu", message.length);
    if (buffer[room] != '!')
        fprintf(out, " OVERRUN");
    free(buffer);
    return code;
}

static int done(char **word, FILE *out)
{
    XID xid;
    const char *call = word[1];
    long rmid = strtol(word[3], NULL, 10), flags = strtol(word[4], NULL, 16);
    if (!strcmp(call, "open"))
        return xa->xa_open_entry(strcmp(word[4], "null") ? word[4] : NULL, atoi(word[2]), strtol(word[3], NULL, 16));
    if (!strcmp(call, "close"))
        return xa->xa_close_entry("", atoi(word[2]), strtol(word[3], NULL, 16));
    if (!strcmp(call, "start"))
        return xa->xa_start_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "end"))
        return xa->xa_end_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "rollback"))
        return xa->xa_rollback_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "prepare"))
        return xa->xa_prepare_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "commit"))
        return xa->xa_commit_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "forget"))
        return xa->xa_forget_entry(read_xid(word[2], &xid), (int)rmid, flags);
    if (!strcmp(call, "complete")) {
        int handle = 0, result = 0;
        return xa->xa_complete_entry(&handle, &result, atoi(word[2]), strtol(word[3], NULL, 16));
    }
    if (!strcmp(call, "recover"))
        return recovered(word, out);
    if (!strcmp(call, "publish"))
        return publish(strcmp(word[2], "-") ? word[2] : "", word[3], word[4], strlen(word[4]), NULL);
    if (!strcmp(call, "publish-with")) {
        struct dtx_properties properties;
        memset(&properties, 0, sizeof properties);
        properties.content_type = "text/plain";
        properties.message_id = "m1";
        properties.correlation_id = "c1";
        properties.reply_to = "r1";
        properties.type = "t1";
        properties.expiration = "3600000";
        properties.priority = (int)strtol(word[5], NULL, 10);
        properties.content_encoding = "gzip";
        properties.app_id = "a1";
        properties.user_id = "guest";
        properties.timestamp = 1700000000;
        const struct dtx_header headers[] = {{.name = "colour", .text = "blue"}, {.name = "count", .number = -7}};
        properties.headers = strcmp(word[6], "null") ? headers : NULL;
        properties.header_count = 2;
        return publish(strcmp(word[2], "-") ? word[2] : "", word[3], word[4], strlen(word[4]), &properties);
    }
    if (!strcmp(call, "publish-nothing"))
        return publish(NULL, word[2], NULL, 0, NULL);
    if (!strcmp(call, "publish-null"))
        return publish("", word[2], NULL, 3, NULL);
    if (!strcmp(call, "publish-large")) {
        size_t length = strtoul(word[3], NULL, 10);
        char *body = calloc(1, length);
        int code = publish("", word[2], body, length, NULL);
        free(body);
        return code;
    }
    if (!strcmp(call, "get"))
        return taken(word, out);
    if (!strcmp(call, "header")) {
        char value[64] = "?";
        int code = header(strtoull(word[2], NULL, 10), word[3], value, strtoul(word[4], NULL, 10));
        fprintf(out, " %s", value);
        return code;
    }
    if (!strcmp(call, "ack"))
        return ack(strtoull(word[2], NULL, 10));
    if (!strcmp(call, "reject"))
        return reject(strtoull(word[2], NULL, 10), (int)rmid);
    if (!strcmp(call, "use"))
        return use(atoi(word[2]));
    if (!strcmp(call, "fork"))
        return forked(word);
    if (!strcmp(call, "crowd"))
        return crowd(word, out);
    if (!strcmp(call, "dlclose"))
        return dlclose(library);
    if (!strcmp(call, "reason")) {
        fprintf(out, " %s", reason());
        return 0;
    }
    fprintf(stderr, "no such call: %s\n", call);
    exit(2);
}

static void *work(void *argument)
{
    struct worker *self = argument;
    for (;;) {
        char line[LINE], *word[WORDS + 1], *rest = line;
        pthread_mutex_lock(&self->lock);
        while (!self->full)
            pthread_cond_wait(&self->changed, &self->lock);
        memcpy(line, self->line, LINE);
        self->full = 0;
        pthread_mutex_unlock(&self->lock);
        for (int at = 0; at <= WORDS; at++) {
            char *next = strsep(&rest, " ");
            word[at] = next ? next : "";
        }
        int leaving = !strcmp(word[1], "leave");
        char *text = NULL;
        size_t size = 0;
        FILE *out = open_memstream(&text, &size);
        int code = leaving ? 0 : done(word, out);
        fclose(out);
        pthread_mutex_lock(&speaking);
        printf("%s %d%s\n", self->name, code, text);
        fflush(stdout);
        pthread_mutex_unlock(&speaking);
        free(text);
        if (leaving)
            return NULL;
    }
}

static struct worker *called(const char *name)
{
    for (int at = 0; at < count; at++)
        if (!strcmp(workers[at].name, name))
            return workers + at;
    if (count == MOST_THREADS)
        exit(2);
    struct worker *fresh = workers + count++;
    snprintf(fresh->name, sizeof fresh->name, "%s", name);
    pthread_mutex_init(&fresh->lock, NULL);
    pthread_cond_init(&fresh->changed, NULL);
    pthread_create(&fresh->thread, NULL, work, fresh);
    return fresh;
}

int main(int argc, char **argv)
{
    static char line[LINE];
    if (argc != 4)
        return 2;
    library = dlopen(argv[1], strcmp(argv[3], "global") ? RTLD_NOW | RTLD_LOCAL : RTLD_LAZY | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    if (!strcmp(argv[2], "dtx_xa_switch"))
        xa = found(argv[2]);
    else
        xa = ((struct xa_switch_t * (*)(void)) found(argv[2]))();
    publish = found("dtx_publish_2");
    get = found("dtx_get_2");
    header = found("dtx_header");
    ack = found("dtx_ack");
    reject = found("dtx_reject");
    use = found("dtx_use");
    reason = found("dtx_reason");
    printf("ready 0 %s %lx %ld\n", xa->name, xa->flags, xa->version);
    fflush(stdout);
    while (fgets(line, LINE, stdin)) {
        line[strcspn(line, "\n")] = 0;
        char name[32];
        sscanf(line, "%31s", name);
        struct worker *one = called(name);
        pthread_mutex_lock(&one->lock);
        memcpy(one->line, line, LINE);
        one->full = 1;
        pthread_cond_signal(&one->changed);
        pthread_mutex_unlock(&one->lock);
        if (strstr(line, " leave"))
            pthread_join(one->thread, NULL), one->name[0] = 0;
    }
    _exit(0);
}
