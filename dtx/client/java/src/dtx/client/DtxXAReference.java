package dtx.client;

import java.io.Serializable;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * A {@link DtxXAResource} in the log of a transaction manager. It has user, address and virtual host, but no password.
 *
 * <p>Narayana writes resources to its log, and uses them after a crash to complete its transactions. Without them it
 * would keep a transaction for ever if its branch was committed before the crash: recovery scans do not list it.
 *
 * <p>Each call uses a {@link DtxXAConnection} of this process with the same values. If there is none, the call raises
 * XAER_RMFAIL and may be repeated later.
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

    /** Work needs the resource of a connection, which has a channel. */
    @Override
    public void start(Xid xid, int flags) throws XAException {
        throw new DtxXAException(XAException.XAER_PROTO, "start: a resource from a log can only complete branches");
    }

    @Override
    public void end(Xid xid, int flags) throws XAException {
        throw new DtxXAException(XAException.XAER_PROTO, "end: a resource from a log can only complete branches");
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
