package dtx.client;

import com.rabbitmq.client.Channel;
import java.io.IOException;
import java.io.Serializable;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Set;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/** The resource for a transaction manager; see {@link DtxXAConnection#getXAResource()}. */
final class DtxXAResource implements XAResource, Serializable {
    private static final long serialVersionUID = 1L;
    private static final int RDONLY = 7;
    private static final int OK = 8;

    private final transient DtxXAConnection connection;
    private transient Channel worked; // the channel on which a branch was started last
    private int timeout;
    private boolean scanning;

    DtxXAResource(DtxXAConnection connection) {
        this.connection = connection;
    }

    /** The object that a log stores instead. */
    private Object writeReplace() {
        return new DtxXAReference(connection.resourceManager());
    }

    @Override
    public synchronized void start(Xid xid, int flags) throws XAException {
        require(flags, "start", TMNOFLAGS, TMJOIN, TMRESUME);
        DtxMethod request = DtxMethod.start(xid, flags == TMJOIN, flags == TMRESUME);
        DtxXid busy = connection.associated();
        if (busy != null) {
            throw new DtxXAException(
                    XAException.XAER_PROTO,
                    request.describe() + ": the channel is associated with " + busy + " until its end");
        }
        Channel channel;
        try {
            channel = connection.getChannel();
        } catch (IOException unreachable) {
            throw DtxXAConnection.notAsked(request, unreachable);
        }
        outcome(connection.demarcate(channel, request), request, false);
        worked = channel;
        connection.associate(
                new DtxXid(xid.getFormatId(), xid.getGlobalTransactionId(), xid.getBranchQualifier()));
        if (flags == TMNOFLAGS && timeout > 0) {
            try {
                connection.coordinate(DtxMethod.setTimeout(xid, timeout));
            } catch (XAException refused) {
                leave(channel, xid);
                throw refused;
            }
        }
    }

    /** Undo a start: a failed start must leave the channel without an association. */
    private void leave(Channel channel, Xid xid) {
        worked = null;
        connection.associate(null);
        try {
            connection.demarcate(channel, DtxMethod.end(xid, true, false));
            connection.coordinate(DtxMethod.rollback(xid));
        } catch (XAException lost) {
            DtxXAConnection.abandon(channel); // without the channel, the branch is rolled back or rollback-only
        }
    }

    @Override
    public synchronized void end(Xid xid, int flags) throws XAException {
        require(flags, "end", TMSUCCESS, TMFAIL, TMSUSPEND);
        DtxMethod request = DtxMethod.end(xid, flags == TMFAIL, flags == TMSUSPEND);
        if (worked == null) {
            throw new DtxXAException(XAException.XAER_PROTO, request.describe() + ": no branch was started");
        }
        DtxXid busy = connection.associated();
        if (busy != null && busy.equals(xid)) {
            connection.associate(null); // the transaction manager treats the branch as ended, whatever the answer is
        }
        Channel channel = connection.workNow();
        if (channel != worked) {
            throw new DtxXAException(
                    XAException.XA_RBROLLBACK, request.describe() + ": the channel was closed, its work is rolled back");
        }
        // Other branches may be suspended, or be ended out of order: only the server knows the remaining associations.
        DtxAnswer answer = connection.demarcate(channel, request);
        // X/Open: TMFAIL asks for "marked rollback-only", so that answer is a success; managers of JTA accept both.
        outcome(answer, request, flags == TMFAIL);
    }

    @Override
    public int prepare(Xid xid) throws XAException {
        DtxMethod request = DtxMethod.prepare(xid);
        return outcome(connection.coordinate(request), request, false) == RDONLY ? XA_RDONLY : XA_OK;
    }

    @Override
    public void commit(Xid xid, boolean onePhase) throws XAException {
        DtxMethod request = DtxMethod.commit(xid, onePhase);
        try {
            outcome(connection.coordinate(request), request, false);
        } catch (DtxXAException unknown) {
            String ending = unknown.getEnding(); // set if the answer to an earlier call was lost
            if (!"committed".equals(ending)) {
                throw "rolled-back".equals(ending) && onePhase ? raised(XAException.XA_RBROLLBACK, request) : unknown;
            }
        }
    }

    @Override
    public void rollback(Xid xid) throws XAException {
        DtxMethod request = DtxMethod.rollback(xid);
        try {
            outcome(connection.coordinate(request), request, true);
        } catch (DtxXAException unknown) {
            if (!"rolled-back".equals(unknown.getEnding())) {
                throw unknown;
            }
        }
    }

    @Override
    public void forget(Xid xid) throws XAException {
        connection.coordinate(DtxMethod.forget(xid));
    }

    /**
     * With TMSTARTRSCAN, all branches in doubt or heuristically completed that the user may complete.
     *
     * <p>The server's answers are pages of a snapshot. The first call fetches all of them, because some transaction
     * managers never continue or end a scan. Later calls of the same scan return nothing.
     */
    @Override
    public synchronized Xid[] recover(int flags) throws XAException {
        if ((flags & ~(TMSTARTRSCAN | TMENDRSCAN)) != 0) {
            throw new DtxXAException(XAException.XAER_INVAL, "recover: unknown flags 0x" + Integer.toHexString(flags));
        }
        List<Xid> found = new ArrayList<>();
        if ((flags & TMSTARTRSCAN) != 0) {
            found.addAll(scanned());
            scanning = true;
        } else if (!scanning) {
            throw new DtxXAException(XAException.XAER_INVAL, "recover: no scan was started");
        }
        if ((flags & TMENDRSCAN) != 0) {
            scanning = false;
        }
        return found.toArray(new Xid[0]);
    }

    private Set<Xid> scanned() throws XAException {
        Set<Xid> found = new LinkedHashSet<>();
        Object channel = null;
        while (true) {
            // A scan belongs to its channel: if the channel was replaced, the scan begins again.
            boolean begun = connection.scanLives(channel);
            List<Xid> page = connection.coordinate(DtxMethod.recover(!begun, false)).xids();
            channel = connection.scanChannel();
            if (page.isEmpty()) {
                connection.coordinate(DtxMethod.recover(false, true));
                return found;
            }
            found.addAll(page);
        }
    }

    /**
     * Whether one may join branches of the other: both have the same user, address and virtual host, and are connected
     * to the same dtx, if several are active behind that address.
     */
    @Override
    public boolean isSameRM(XAResource other) {
        return connection.resourceManager().equals(resourceManager(other))
                && (!(other instanceof DtxXAResource)
                        || connection.hasMemberOf(((DtxXAResource) other).connection));
    }

    /** The resource manager of {@code other}; {@code null} if it is not dtx. */
    static String resourceManager(XAResource other) {
        if (other instanceof DtxXAReference) {
            return ((DtxXAReference) other).resourceManager();
        }
        return other instanceof DtxXAResource ? ((DtxXAResource) other).connection.resourceManager() : null;
    }

    @Override
    public synchronized int getTransactionTimeout() {
        return timeout;
    }

    /**
     * Set the time from start to prepare for branches that are started from now on. 0 is the default of the server;
     * higher values than its --max-timeout are reduced to that.
     */
    @Override
    public synchronized boolean setTransactionTimeout(int seconds) throws XAException {
        if (seconds < 0) {
            throw new DtxXAException(XAException.XAER_INVAL, "a timeout of " + seconds + " s");
        }
        timeout = seconds;
        return true;
    }

    /** The resource manager and its user, for logs. */
    @Override
    public String toString() {
        return "dtx " + connection.resourceManager();
    }

    private static void require(int flags, String call, int... possible) throws XAException {
        for (int one : possible) {
            if (flags == one) {
                return;
            }
        }
        throw new DtxXAException(XAException.XAER_INVAL, call + ": flags 0x" + Integer.toHexString(flags));
    }

    /** Return xa-ok and xa-rdonly, raise every other flag. For a rollback, xa-rb* is a success. */
    private static int outcome(DtxAnswer answer, DtxMethod request, boolean rollback) throws DtxXAException {
        int flags = answer.flags();
        if (flags == OK || flags == RDONLY) {
            return flags;
        }
        for (DtxXAException.Code code : DtxXAException.Code.values()) {
            if (flags > 0 && flags == code.flag) {
                if (rollback && code.number >= XAException.XA_RBBASE && code.number <= XAException.XA_RBEND) {
                    return OK;
                }
                throw raised(code.number, request);
            }
        }
        throw new DtxXAException(
                XAException.XAER_RMERR, request.describe() + " was answered with unknown flags " + flags);
    }

    private static DtxXAException raised(int code, DtxMethod request) {
        return new DtxXAException(code, request.describe());
    }
}
