/*
 * The XA interface between transaction managers and resource managers: names and numbers of X/Open CAE Specification
 * C193, "Distributed Transaction Processing: The XA Specification", chapters 4 and 5. The comments are dtx's.
 *
 * Every xa.h of that specification has the same contents: if another one is included before, this one adds nothing.
 */
#ifndef XA_H
#define XA_H

#define MAXGTRIDSIZE 64 /* maximum bytes of a global transaction identifier */
#define MAXBQUALSIZE 64 /* maximum bytes of a branch qualifier */

/* One branch of one transaction: data begins with the gtrid, and the bqual follows it without a gap. A tx.h may define
 * the structure, too; then it defines XID_T_TYPE, or at least XIDDATASIZE. */
#ifndef XID_T_TYPE
#define XID_T_TYPE
#ifndef XIDDATASIZE
#define XIDDATASIZE 128 /* maximum bytes of gtrid and bqual together */
struct xid_t {
    long formatID;     /* format of gtrid and bqual; -1: null xid */
    long gtrid_length; /* 1 to 64 */
    long bqual_length; /* 0 to 64 */
    char data[XIDDATASIZE];
};
typedef struct xid_t XID;
#endif
#endif

#define RMNAMESZ 32     /* bytes of the name of a resource manager, with its NUL */
#define MAXINFOSIZE 256 /* bytes of an open or close string, with its NUL */

/* The interface of a resource manager for transaction managers. */
struct xa_switch_t {
    char name[RMNAMESZ];
    long flags;
    long version; /* 0 */
    int (*xa_open_entry)(char *info, int rmid, long flags);
    int (*xa_close_entry)(char *info, int rmid, long flags);
    int (*xa_start_entry)(const XID *xid, int rmid, long flags);
    int (*xa_end_entry)(const XID *xid, int rmid, long flags);
    int (*xa_rollback_entry)(const XID *xid, int rmid, long flags);
    int (*xa_prepare_entry)(const XID *xid, int rmid, long flags);
    int (*xa_commit_entry)(const XID *xid, int rmid, long flags);
    int (*xa_recover_entry)(XID *xids, long count, int rmid, long flags);
    int (*xa_forget_entry)(const XID *xid, int rmid, long flags);
    int (*xa_complete_entry)(int *handle, int *result, int rmid, long flags);
};

/* flags of a switch */
#define TMNOFLAGS 0x00000000L  /* no flags; also for calls */
#define TMREGISTER 0x00000001L /* it registers branches dynamically, with ax_reg */
#define TMNOMIGRATE 0x00000002L /* only the same thread can resume a suspended association */
#define TMUSEASYNC 0x00000004L /* its calls can be asynchronous */

/* flags of calls */
#define TMASYNC 0x80000000L      /* make the call asynchronously */
#define TMONEPHASE 0x40000000L   /* commit without prepare */
#define TMFAIL 0x20000000L       /* dissociate, and mark the branch rollback-only */
#define TMNOWAIT 0x10000000L     /* return instead of waiting for other branches */
#define TMRESUME 0x08000000L     /* resume a suspended branch */
#define TMSUCCESS 0x04000000L    /* dissociate */
#define TMSUSPEND 0x02000000L    /* suspend the association */
#define TMSTARTRSCAN 0x01000000L /* begin a recovery scan */
#define TMENDRSCAN 0x00800000L   /* end the scan after this call */
#define TMMULTIPLE 0x00400000L   /* wait for any asynchronous call */
#define TMJOIN 0x00200000L       /* join a branch that exists */
#define TMMIGRATE 0x00100000L    /* another thread will resume the association */

/* answers: a branch that is, or will be, rolled back */
#define XA_RBBASE 100
#define XA_RBROLLBACK XA_RBBASE          /* no reason is given */
#define XA_RBCOMMFAIL (XA_RBBASE + 1)    /* communication failed */
#define XA_RBDEADLOCK (XA_RBBASE + 2)    /* there was a deadlock */
#define XA_RBINTEGRITY (XA_RBBASE + 3)   /* the work violates integrity */
#define XA_RBOTHER (XA_RBBASE + 4)       /* another reason */
#define XA_RBPROTO (XA_RBBASE + 5)       /* a protocol error in the resource manager */
#define XA_RBTIMEOUT (XA_RBBASE + 6)     /* the branch took too long */
#define XA_RBTRANSIENT (XA_RBBASE + 7)   /* the work may be tried again */
#define XA_RBEND XA_RBTRANSIENT

/* answers: results and heuristic outcomes */
#define XA_NOMIGRATE 9 /* suspended; only the same thread can resume it */
#define XA_HEURHAZ 8   /* the branch may have been completed heuristically */
#define XA_HEURCOM 7   /* the branch was committed heuristically */
#define XA_HEURRB 6    /* the branch was rolled back heuristically */
#define XA_HEURMIX 5   /* the branch was partly committed and partly rolled back heuristically */
#define XA_RETRY 4     /* the call had no effect; repeat it */
#define XA_RDONLY 3    /* there was nothing to commit, and the branch has ended */
#define XA_OK 0

/* answers: errors */
#define XAER_ASYNC (-2)   /* asynchronous calls are not possible */
#define XAER_RMERR (-3)   /* an error of the resource manager in this branch */
#define XAER_NOTA (-4)    /* the xid is not known */
#define XAER_INVAL (-5)   /* an argument is not possible */
#define XAER_PROTO (-6)   /* the state does not allow the call */
#define XAER_RMFAIL (-7)  /* the resource manager is out of reach */
#define XAER_DUPID (-8)   /* the xid exists already */
#define XAER_OUTSIDE (-9) /* there is work outside of any branch */

#endif
