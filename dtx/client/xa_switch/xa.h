/*
 * The XA interface between transaction managers and resource managers: names and numbers of X/Open CAE Specification
 * C193, "Distributed Transaction Processing: The XA Specification", chapters 4 and 5. The words are our own.
 *
 * Any other xa.h of that specification says the same: where one is included already, this one adds nothing.
 */
#ifndef XA_H
#define XA_H

#define MAXGTRIDSIZE 64 /* octets of a global transaction identifier, at most */
#define MAXBQUALSIZE 64 /* octets of a branch qualifier, at most */

/* One branch of one transaction: the gtrid begins data, the bqual follows it without a gap. A tx.h defines it, too: it
 * says so by XID_T_TYPE, or at least by XIDDATASIZE. */
#ifndef XID_T_TYPE
#define XID_T_TYPE
#ifndef XIDDATASIZE
#define XIDDATASIZE 128 /* octets of gtrid and bqual together, at most */
struct xid_t {
    long formatID;     /* who made it; -1: there is no xid */
    long gtrid_length; /* 1 to 64 */
    long bqual_length; /* 0 to 64 */
    char data[XIDDATASIZE];
};
typedef struct xid_t XID;
#endif
#endif

#define RMNAMESZ 32     /* octets of a resource manager's name, with its NUL */
#define MAXINFOSIZE 256 /* octets of an open or close string, with its NUL */

/* What a resource manager gives to transaction managers. */
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
#define TMNOFLAGS 0x00000000L  /* none; of calls, too */
#define TMREGISTER 0x00000001L /* it registers branches itself, by ax_reg */
#define TMNOMIGRATE 0x00000002L /* a suspended association is resumed by its own thread alone */
#define TMUSEASYNC 0x00000004L /* its calls can be asynchronous */

/* flags of calls */
#define TMASYNC 0x80000000L      /* do it asynchronously */
#define TMONEPHASE 0x40000000L   /* commit without prepare */
#define TMFAIL 0x20000000L       /* leave the branch, which can only be rolled back from now on */
#define TMNOWAIT 0x10000000L     /* come back rather than wait for others */
#define TMRESUME 0x08000000L     /* go on with a suspended branch */
#define TMSUCCESS 0x04000000L    /* leave the branch */
#define TMSUSPEND 0x02000000L    /* leave the branch for a while */
#define TMSTARTRSCAN 0x01000000L /* begin a recovery scan */
#define TMENDRSCAN 0x00800000L   /* end it after this call */
#define TMMULTIPLE 0x00400000L   /* any asynchronous call */
#define TMJOIN 0x00200000L       /* the branch exists, and others work for it */
#define TMMIGRATE 0x00100000L    /* another thread is to resume it */

/* answers: a branch that is, or will be, rolled back */
#define XA_RBBASE 100
#define XA_RBROLLBACK XA_RBBASE          /* no reason is given */
#define XA_RBCOMMFAIL (XA_RBBASE + 1)    /* communication failed */
#define XA_RBDEADLOCK (XA_RBBASE + 2)    /* there was a deadlock */
#define XA_RBINTEGRITY (XA_RBBASE + 3)   /* the work contradicts itself */
#define XA_RBOTHER (XA_RBBASE + 4)       /* none of these */
#define XA_RBPROTO (XA_RBBASE + 5)       /* the resource manager was used in a wrong way inside */
#define XA_RBTIMEOUT (XA_RBBASE + 6)     /* it took too long */
#define XA_RBTRANSIENT (XA_RBBASE + 7)   /* it may be tried again */
#define XA_RBEND XA_RBTRANSIENT

/* answers: what was done, or was done otherwise */
#define XA_NOMIGRATE 9 /* it is suspended, and has to be resumed by the same thread */
#define XA_HEURHAZ 8   /* somebody may have completed it otherwise */
#define XA_HEURCOM 7   /* somebody has committed it */
#define XA_HEURRB 6    /* somebody has rolled it back */
#define XA_HEURMIX 5   /* somebody has done both, in part */
#define XA_RETRY 4     /* nothing has happened, ask again */
#define XA_RDONLY 3    /* there was nothing to commit, and the branch is gone */
#define XA_OK 0

/* answers: errors */
#define XAER_ASYNC (-2)   /* no asynchronous call is possible */
#define XAER_RMERR (-3)   /* the resource manager failed in this branch */
#define XAER_NOTA (-4)    /* the xid is not known */
#define XAER_INVAL (-5)   /* an argument is not possible */
#define XAER_PROTO (-6)   /* this is not the moment for the call */
#define XAER_RMFAIL (-7)  /* the resource manager is out of reach */
#define XAER_DUPID (-8)   /* the xid exists already */
#define XAER_OUTSIDE (-9) /* there is work outside of any branch */

#endif
