/*
 * dtx for programs whose transactions are driven by an X/Open transaction manager: the switch that the manager drives,
 * and what a program does with messages while one of its threads is associated with a branch.
 *
 * Thread rules: a thread of control is a thread of the operating system. Each calls xa_open for itself, and has a
 * connection of its own for each resource manager id. Everything here is about the branch that the calling thread is
 * associated with. Any thread, of any process, that has called xa_open may prepare, commit, roll back and recover
 * branches that others have ended. A process that forks must do so before its first xa_open: in the child of a process
 * that has called one every call ends in XAER_PROTO.
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
#define DTX_TRUNCATED 2 /* the buffer is too small: call again with a larger one, and get the same message */

#define DTX_SHORT_STRING 256 /* octets of a short string, with its NUL */

/* The switch: static registration; TMNOMIGRATE; version 0. */
extern struct xa_switch_t dtx_xa_switch;

/* The same, as LIXA and Enduro/X look for it. */
struct xa_switch_t *lixa_get_xa_switch(void);
struct xa_switch_t *ndrx_get_xa_switch(void);

/* The structures below have grown. A program that was compiled with smaller ones does not find these functions. */
#define dtx_publish dtx_publish_2
#define dtx_get dtx_get_2

/* One header of a message that is published. */
struct dtx_header {
    const char *name;
    const char *text; /* UTF-8; NULL: the value is the number */
    int64_t number;
};

/* Properties of a message that is published. Begin with all of it 0: what is NULL or 0 is not set. */
struct dtx_properties {
    const char *content_type;
    const char *message_id;
    const char *correlation_id;
    const char *reply_to;
    const char *type;
    const char *expiration; /* milliseconds, in decimal digits */
    int priority;           /* 1 to 255 */
    int transient;          /* not 0: it need not survive the broker */
    const char *content_encoding;
    const char *app_id;
    const char *user_id; /* that of the open string's url: the server refuses any other */
    int64_t timestamp;   /* seconds since 1970 */
    const struct dtx_header *headers;
    size_t header_count;
};

/* What is told of a message that was taken. Strings end with NUL, "" where there is none. */
struct dtx_message {
    uint64_t delivery_tag; /* what dtx_ack wants */
    size_t length;         /* octets of the body */
    int redelivered;       /* not 0: somebody was given it before */
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
    int64_t timestamp; /* seconds since 1970, 0: there is none */
};

/*
 * These return XA_OK when they have done what they say, and else
 *   XAER_PROTO     the thread is not associated with a branch, or with several and dtx_use was not called
 *   XAER_INVAL     an argument is not possible
 *   XA_RBROLLBACK  the server refused, now or earlier: this branch can only be rolled back (see dtx_reason)
 *   XAER_RMFAIL    the server is out of reach: this branch is rolled back, or will be
 */

/* Publish; it is there for others when the branch commits. A refusal may be told by a later call, xa_end at last. */
int dtx_publish(const char *exchange, const char *routing_key, const void *body, size_t length,
                const struct dtx_properties *properties /* or NULL */);

/* Take one message out of a queue. It stays taken when it is acknowledged and the branch commits; what was not
 * acknowledged goes back when the thread leaves the branch. DTX_EMPTY; DTX_TRUNCATED, with message->length. */
int dtx_get(const char *queue, void *buffer, size_t size, struct dtx_message *message);

/* One header of a message that this thread took in this branch and has not settled: text, a number or a time (seconds
 * since 1970) in decimal digits, "true" or "false", with a NUL. DTX_EMPTY: there is no such header, or it has no value;
 * DTX_TRUNCATED: the buffer is too small; XAER_INVAL: it is a table or an array. */
int dtx_header(uint64_t delivery_tag, const char *name, char *buffer, size_t size);

/* Acknowledge one message that this thread took in this branch. */
int dtx_ack(uint64_t delivery_tag);

/* Give one back when the branch has ended; requeue 0: the queue drops or dead-letters it where the branch commits. */
int dtx_reject(uint64_t delivery_tag, int requeue);

/* For threads that are associated with branches of several resource managers of dtx: which one these functions mean
 * from now on; -1: the only one. */
int dtx_use(int rmid);

/* Why the last call of this thread, of these or of the switch, did not return XA_OK: a line for people, never NULL. */
const char *dtx_reason(void);

#ifdef __cplusplus
}
#endif

#endif
