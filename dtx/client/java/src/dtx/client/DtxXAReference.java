package dtx.client;

import java.io.Serializable;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * A {@link DtxXAResource} in the log of a transaction manager: names user, address and virtual host, and no password.
 *
 * <p>Narayana writes resources to its log, and asks them after a crash for what it had begun. Without that it keeps a
 * transaction for ever whose branch was committed before the crash: a recovery scan does not have that branch any more.
 *
 * <p>Each call goes to a {@link DtxXAConnection} of this process that names the same; where there is none, the call may
 * be repeated later (XAER_RMFAIL).
 */
final class DtxXAReference implements XAResource, Serializable {
    private static final long serialVersionUID = 1L;

    private final String resourceManager;

    DtxXAReference(String resourceManager) {
        this.resourceManager = resourceManager;
    }

    String resourceManager() {
        return resourceManager;
    }

    private XAResource resource(String call) throws XAException {
        DtxXAConnection connection = DtxXAConnection.named(resourceManager);
        if (connection == null) {
            throw new DtxXAException(
                    XAException.XAER_RMFAIL, call + ": this process has no DtxXAConnection to " + resourceManager);
        }
        return connection.getXAResource();
    }

    @Override
    public int prepare(Xid xid) throws XAException {
        return resource("prepare").prepare(xid);
    }

    @Override
    public void commit(Xid xid, boolean onePhase) throws XAException {
        resource("commit").commit(xid, onePhase);
    }

    @Override
    public void rollback(Xid xid) throws XAException {
        resource("rollback").rollback(xid);
    }

    @Override
    public void forget(Xid xid) throws XAException {
        resource("forget").forget(xid);
    }

    @Override
    public Xid[] recover(int flags) throws XAException {
        return resource("recover").recover(flags);
    }

    /** Work needs a channel, and so the resource of a connection. */
    @Override
    public void start(Xid xid, int flags) throws XAException {
        throw new DtxXAException(XAException.XAER_PROTO, "start: a resource from a log completes branches and no more");
    }

    @Override
    public void end(Xid xid, int flags) throws XAException {
        throw new DtxXAException(XAException.XAER_PROTO, "end: a resource from a log completes branches and no more");
    }

    @Override
    public boolean isSameRM(XAResource other) {
        return resourceManager.equals(DtxXAResource.resourceManager(other));
    }

    @Override
    public int getTransactionTimeout() {
        return 0;
    }

    @Override
    public boolean setTransactionTimeout(int seconds) {
        return false;
    }

    @Override
    public String toString() {
        return "dtx " + resourceManager;
    }
}
