/*
 * dtx for programs with an X/Open transaction manager: the switch for the transaction manager, and functions that
 * publish and consume messages while a thread is associated with a branch.
 *
 * Threads: a thread of control is a thread of the operating system. Each thread calls xa_open for itself, and has its
 * own connection for each resource manager id. All functions work for the branch that the calling thread is associated
 * with. Any thread of any process that has called xa_open may prepare, commit, roll back and recover branches that
 * other threads have ended. A process must fork before its first xa_open: in a child of a process that has called
 * xa_open, every call ends in XAER_PROTO.
 */
#ifndef DTX_XA_H
#define DTX_XA_H

#include <stddef.h>
#include <stdint.h>

#include "xa.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DTX_EMPTY 1     /* the queue has no message */
#define DTX_TRUNCATED 2 /* the buffer is too small: call again with a larger one to get the same message */

#define DTX_SHORT_STRING 256 /* bytes of a short string, with its NUL */

/* The switch: static registration; TMNOMIGRATE; version 0. */
extern struct xa_switch_t dtx_xa_switch;

/* The same switch, by the functions that LIXA and Enduro/X look for. */
struct xa_switch_t *lixa_get_xa_switch(void);
struct xa_switch_t *ndrx_get_xa_switch(void);

/* The structures below have grown. The new names prevent calls by programs that were compiled with smaller ones. */
#define dtx_publish dtx_publish_2
#define dtx_get dtx_get_2

/* A header of a message to publish. */
struct dtx_header {
    const char *name;
    const char *text; /* UTF-8; NULL: the value is the number */
    int64_t number;
};

/* Properties of a message to publish. Initialize all fields to 0: fields that are NULL or 0 are not set. */
struct dtx_properties {
    const char *content_type;
    const char *message_id;
    const char *correlation_id;
    const char *reply_to;
    const char *type;
    const char *expiration; /* milliseconds, in decimal digits */
    int priority;           /* 1 to 255 */
    int transient;          /* not 0: the message need not survive a restart of the broker */
    const char *content_encoding;
    const char *app_id;
    const char *user_id; /* the user of url in the open string: the server refuses others */
    int64_t timestamp;   /* seconds since 1970 */
    const struct dtx_header *headers;
    size_t header_count;
};

/* A message from a queue, without its body. Strings end with NUL; "" means that the property is not set. */
struct dtx_message {
    uint64_t delivery_tag; /* for dtx_ack, dtx_reject and dtx_header */
    size_t length;         /* bytes of the body */
    int redelivered;       /* not 0: it was delivered before */
    char exchange[DTX_SHORT_STRING];
    char routing_key[DTX_SHORT_STRING];
    char content_type[DTX_SHORT_STRING];
    char message_id[DTX_SHORT_STRING];
    char correlation_id[DTX_SHORT_STRING];
    char reply_to[DTX_SHORT_STRING];
    char type[DTX_SHORT_STRING];
    char content_encoding[DTX_SHORT_STRING];
    char app_id[DTX_SHORT_STRING];
    char user_id[DTX_SHORT_STRING];
    int64_t timestamp; /* seconds since 1970; 0: not set */
};

/*
 * These functions return XA_OK on success, a code above, or
 *   XAER_PROTO     the thread is not associated with a branch, or with several and dtx_use was not called
 *   XAER_INVAL     an argument is not possible
 *   XA_RBROLLBACK  the server has refused this or an earlier call: the branch is rollback-only (see dtx_reason)
 *   XAER_RMFAIL    the server is out of reach: the branch is rolled back, or will be
 */

/* Publish a message. Consumers can get it when the branch commits. A later call, xa_end at the latest, may return a
 * refusal. */
int dtx_publish(const char *exchange, const char *routing_key, const void *body, size_t length,
                const struct dtx_properties *properties /* or NULL */);

/* Take one message from a queue. If it is acknowledged and the branch commits, it is removed. An unacknowledged message
 * returns to the queue after xa_end. DTX_EMPTY; DTX_TRUNCATED, with message->length. */
int dtx_get(const char *queue, void *buffer, size_t size, struct dtx_message *message);

/* Get a header of a message that this thread took in this branch and has not settled: text, a number or a time (seconds
 * since 1970) in decimal digits, "true" or "false", with a NUL. DTX_EMPTY: there is no such header, or it has no value;
 * DTX_TRUNCATED: the buffer is too small; XAER_INVAL: it is a table or an array. */
int dtx_header(uint64_t delivery_tag, const char *name, char *buffer, size_t size);

/* Acknowledge a message that this thread took in this branch. */
int dtx_ack(uint64_t delivery_tag);

/* Reject a message. After the end of the branch it returns to its queue; with requeue 0, the queue drops or
 * dead-letters it if the branch commits. */
int dtx_reject(uint64_t delivery_tag, int requeue);

/* Choose the resource manager for these functions, for threads with branches of several resource managers of dtx. -1:
 * the only one that the thread is associated with. */
int dtx_use(int rmid);

/* The reason why the last call of this thread, here or of the switch, did not return XA_OK: one line, never NULL. */
const char *dtx_reason(void);

#ifdef __cplusplus
}
#endif

#endif
