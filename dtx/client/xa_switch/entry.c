/*
 * The entry points of the switch. They pass every call to Python (bridge.py) and decide nothing themselves.
 *
 * Theory of operation. XA_OK is 0. cffi returns 0 too if Python cannot be started or a call is broken off. So no entry
 * point returns the value of the Python function. Each has an outcome that is initialized to a failure and that only a
 * completed call replaces. The failure is XAER_RMFAIL, because it tells a transaction manager nothing about the branch:
 * XAER_RMERR of xa_commit would mean "the work is rolled back". xa_open and xa_close may not return XAER_RMFAIL; their
 * failure is XAER_RMERR.
 *
 * This file starts Python itself: if the start failed in cffi, cffi would end the process of the transaction manager.
 * Python is never ended: the object is linked with -z nodelete, so dlclose does not unload it.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dtx_xa.h"

#define EXPORTED __attribute__((visibility("default")))
#define REASON 512

struct dtx_outcome {
    int code;
    char reason[REASON];
};

enum dtx_call { DTX_START, DTX_END, DTX_ROLLBACK, DTX_PREPARE, DTX_COMMIT, DTX_FORGET };

/* Implemented in bridge.py. */
static void dtx_py_open(uint64_t thread, char *info, int rmid, long flags, struct dtx_outcome *outcome);
static void dtx_py_close(uint64_t thread, int rmid, long flags, struct dtx_outcome *outcome);
static void dtx_py_branch(uint64_t thread, int call, XID *xid, int rmid, long flags, struct dtx_outcome *outcome);
static void dtx_py_recover(uint64_t thread, XID *xids, long count, int rmid, long flags, struct dtx_outcome *outcome);
static void dtx_py_complete(uint64_t thread, int rmid, long flags, struct dtx_outcome *outcome);
static void dtx_py_publish(uint64_t thread, char *exchange, char *routing_key, void *body, size_t length,
                           struct dtx_properties *properties, struct dtx_outcome *outcome);
static void dtx_py_get(uint64_t thread, char *queue, void *buffer, size_t size, struct dtx_message *message,
                       struct dtx_outcome *outcome);
static void dtx_py_header(uint64_t thread, uint64_t delivery_tag, char *name, char *buffer, size_t size,
                          struct dtx_outcome *outcome);
static void dtx_py_settle(uint64_t thread, uint64_t delivery_tag, int how, struct dtx_outcome *outcome);
static void dtx_py_use(uint64_t thread, int rmid, struct dtx_outcome *outcome);
static void dtx_py_gone(uint64_t thread);
static int cffi_start_python(void); /* of cffi: connects the functions above with Python */

/* -- Python -------------------------------------------------------------------------------------------------------- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t threads;
static pid_t owner;                /* the process that Python runs in */
static char broken[REASON] = "";   /* the reason why Python could not be started */
static atomic_uint_fast64_t known; /* threads so far */

static _Thread_local uint64_t thread;             /* number of this thread; the system reuses its own ids */
static _Thread_local struct dtx_outcome outcome_; /* of its last call */

/* A thread of control ends, perhaps without xa_close: no other thread can end its associations. */
static void thread_ends(void *number)
{
    if (getpid() == owner && !broken[0])
        dtx_py_gone((uint64_t)(uintptr_t)number);
}

/* Extension modules find Python's functions in the global scope, but a program may load this object with RTLD_LOCAL. */
static void share_python(void)
{
    Dl_info found;
    if (dladdr((void *)(uintptr_t)&Py_InitializeFromConfig, &found) && found.dli_fname)
        (void)dlopen(found.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_GLOBAL);
}

static PyStatus start_interpreter(void)
{
    const char *program = getenv("DTX_PYTHON");
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    config.parse_argv = 0;
    /* From the path of the program, Python finds pyvenv.cfg and so the packages of the environment that has dtx. */
    PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, program && *program ? program : DTX_PROGRAM);
    if (!PyStatus_Exception(status))
        status = PyConfig_SetBytesString(&config, &config.executable, program && *program ? program : DTX_PROGRAM);
    if (!PyStatus_Exception(status))
        status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    return status;
}

static void start(void)
{
    owner = getpid();
    if (pthread_key_create(&threads, thread_ends) != 0) {
        snprintf(broken, REASON, "no thread-specific data is left in this process");
        return;
    }
    if (!Py_IsInitialized()) {
        share_python();
        PyStatus status = start_interpreter();
        if (PyStatus_Exception(status)) {
            snprintf(broken, REASON, "Python cannot be started: %s", status.err_msg ? status.err_msg : "no reason given");
            fprintf(stderr, "dtx_xa_switch: %s\n", broken);
            return;
        }
        (void)PyEval_SaveThread();
    }
    if (cffi_start_python() != 0)
        snprintf(broken, REASON, "the package dtx cannot be loaded by " DTX_PROGRAM " or DTX_PYTHON: see stderr");
}

/* Prepares each call and returns whether Python can be used. The outcome is a failure until Python replaces it. */
static int begun(int failure)
{
    outcome_.code = failure;
    snprintf(outcome_.reason, REASON, "the call was broken off by an internal error: see stderr");
    (void)pthread_once(&once, start);
    if (getpid() != owner) {
        outcome_.code = XAER_PROTO;
        snprintf(outcome_.reason, REASON, "this process was forked after xa_open: fork before xa_open");
        return 0;
    }
    if (broken[0]) {
        snprintf(outcome_.reason, REASON, "%s", broken);
        return 0;
    }
    if (thread == 0) {
        thread = atomic_fetch_add(&known, 1) + 1;
        if (pthread_setspecific(threads, (void *)(uintptr_t)thread) != 0) {
            thread = 0;
            snprintf(outcome_.reason, REASON, "no memory for thread-specific data");
            return 0;
        }
    }
    return 1;
}

/* -- the switch ---------------------------------------------------------------------------------------------------- */

static int entry_open(char *info, int rmid, long flags)
{
    if (begun(XAER_RMERR))
        dtx_py_open(thread, info, rmid, flags, &outcome_);
    return outcome_.code;
}

static int entry_close(char *info, int rmid, long flags)
{
    (void)info;
    if (begun(XAER_RMERR))
        dtx_py_close(thread, rmid, flags, &outcome_);
    return outcome_.code;
}

static int branch(enum dtx_call call, const XID *xid, int rmid, long flags)
{
    if (begun(XAER_RMFAIL))
        dtx_py_branch(thread, call, (XID *)(uintptr_t)xid, rmid, flags, &outcome_);
    return outcome_.code;
}

static int entry_start(const XID *xid, int rmid, long flags)
{
    return branch(DTX_START, xid, rmid, flags);
}

static int entry_end(const XID *xid, int rmid, long flags)
{
    return branch(DTX_END, xid, rmid, flags);
}

static int entry_rollback(const XID *xid, int rmid, long flags)
{
    return branch(DTX_ROLLBACK, xid, rmid, flags);
}

static int entry_prepare(const XID *xid, int rmid, long flags)
{
    return branch(DTX_PREPARE, xid, rmid, flags);
}

static int entry_commit(const XID *xid, int rmid, long flags)
{
    return branch(DTX_COMMIT, xid, rmid, flags);
}

static int entry_forget(const XID *xid, int rmid, long flags)
{
    return branch(DTX_FORGET, xid, rmid, flags);
}

static int entry_recover(XID *xids, long count, int rmid, long flags)
{
    if (begun(XAER_RMFAIL))
        dtx_py_recover(thread, xids, count, rmid, flags, &outcome_);
    return outcome_.code;
}

static int entry_complete(int *handle, int *result, int rmid, long flags)
{
    (void)handle;
    (void)result;
    if (begun(XAER_RMFAIL))
        dtx_py_complete(thread, rmid, flags, &outcome_);
    return outcome_.code;
}

EXPORTED struct xa_switch_t dtx_xa_switch = {
    .name = "dtx",
    .flags = TMNOMIGRATE,
    .version = 0,
    .xa_open_entry = entry_open,
    .xa_close_entry = entry_close,
    .xa_start_entry = entry_start,
    .xa_end_entry = entry_end,
    .xa_rollback_entry = entry_rollback,
    .xa_prepare_entry = entry_prepare,
    .xa_commit_entry = entry_commit,
    .xa_recover_entry = entry_recover,
    .xa_forget_entry = entry_forget,
    .xa_complete_entry = entry_complete,
};

EXPORTED struct xa_switch_t *lixa_get_xa_switch(void)
{
    return &dtx_xa_switch;
}

EXPORTED struct xa_switch_t *ndrx_get_xa_switch(void)
{
    return &dtx_xa_switch;
}

/* -- work ---------------------------------------------------------------------------------------------------------- */

EXPORTED int dtx_publish(const char *exchange, const char *routing_key, const void *body, size_t length,
                         const struct dtx_properties *properties)
{
    if (begun(XAER_RMFAIL))
        dtx_py_publish(thread, (char *)(uintptr_t)exchange, (char *)(uintptr_t)routing_key, (void *)(uintptr_t)body,
                       length, (struct dtx_properties *)(uintptr_t)properties, &outcome_);
    return outcome_.code;
}

EXPORTED int dtx_get(const char *queue, void *buffer, size_t size, struct dtx_message *message)
{
    if (begun(XAER_RMFAIL))
        dtx_py_get(thread, (char *)(uintptr_t)queue, buffer, size, message, &outcome_);
    return outcome_.code;
}

EXPORTED int dtx_header(uint64_t delivery_tag, const char *name, char *buffer, size_t size)
{
    if (begun(XAER_RMFAIL))
        dtx_py_header(thread, delivery_tag, (char *)(uintptr_t)name, buffer, size, &outcome_);
    return outcome_.code;
}

EXPORTED int dtx_ack(uint64_t delivery_tag)
{
    if (begun(XAER_RMFAIL))
        dtx_py_settle(thread, delivery_tag, 0, &outcome_);
    return outcome_.code;
}

EXPORTED int dtx_reject(uint64_t delivery_tag, int requeue)
{
    if (begun(XAER_RMFAIL))
        dtx_py_settle(thread, delivery_tag, requeue ? 1 : 2, &outcome_);
    return outcome_.code;
}

EXPORTED int dtx_use(int rmid)
{
    if (begun(XAER_RMFAIL))
        dtx_py_use(thread, rmid, &outcome_);
    return outcome_.code;
}

EXPORTED const char *dtx_reason(void)
{
    return outcome_.reason;
}
