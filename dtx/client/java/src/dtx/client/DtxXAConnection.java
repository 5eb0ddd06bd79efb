package dtx.client;

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.AlreadyClosedException;
import com.rabbitmq.client.Channel;
import com.rabbitmq.client.Command;
import com.rabbitmq.client.Connection;
import com.rabbitmq.client.PossibleAuthenticationFailureException;
import com.rabbitmq.client.ShutdownSignalException;
import java.io.IOException;
import java.util.Collections;
import java.util.Map;
import java.util.Set;
import java.util.WeakHashMap;
import java.util.concurrent.TimeoutException;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;

/**
 * A connection to dtx that takes part in XA transactions: a channel for work, and the resource for the transaction
 * manager.
 *
 * <p>Between {@code start} and {@code end} of the resource, messages that are published and acknowledged on
 * {@link #getChannel()} belong to the branch. Otherwise work on that channel is not transactional. If the channel is
 * closed within a branch, there is no new one before {@code end}: its work would take effect at once, outside it.
 *
 * <p>It connects at the first use, and again after the connection was lost: dtx may be restarted at any time, and
 * prepared branches survive that. The channel is a new one then, so get it in each transaction, and start consumers
 * again. A call whose answer was lost raises XAER_RMFAIL and may be repeated.
 *
 * <p>Threads: like a JDBC connection, one transaction at a time. Calls for the second phase and for recovery have their
 * own channel, so another thread may commit and recover at the same time.
 */
public final class DtxXAConnection implements AutoCloseable {
    private static final int CHANNEL_ERROR = 504;
    private static final Set<DtxXAConnection> KNOWN = Collections.newSetFromMap(new WeakHashMap<>());

    private final DtxConnectionFactory factory;
    private final DtxXAResource resource = new DtxXAResource(this);
    private final Object coordinating = new Object();
    private Connection connection;
    private Channel work;
    private Channel coordination;
    private DtxXid associated;
    private volatile boolean closed;

    /**
     * @param factory address of dtx, user and options; it connects at the first use
     */
    public DtxXAConnection(DtxConnectionFactory factory) {
        this.factory = factory;
        synchronized (KNOWN) {
            KNOWN.add(this);
        }
    }

    /** Any connection of this process to {@code resourceManager} that is not closed; {@code null} if there is none. */
    static DtxXAConnection named(String resourceManager) {
        synchronized (KNOWN) {
            for (DtxXAConnection one : KNOWN) {
                if (!one.closed && one.resourceManager().equals(resourceManager)) {
                    return one;
                }
            }
        }
        return null;
    }

    /**
     * The channel for work. Never close it. After a channel exception outside a branch, the next call opens a new one.
     *
     * @return an open channel that is selected for distributed transactions
     * @throws IOException the channel was closed within a branch that has not been ended; or dtx is out of reach, the
     *     server is not dtx, or the user may not use transactions
     */
    public synchronized Channel getChannel() throws IOException {
        if (work == null || !work.isOpen()) {
            if (associated != null) {
                throw new IOException(
                        "the channel was closed within branch " + associated
                                + ", whose work is rolled back: end the branch first");
            }
            Channel fresh = open();
            try {
                fresh.rpc(DtxMethod.select());
            } catch (IOException refused) {
                abandon(fresh);
                throw refused;
            }
            work = fresh;
        }
        return work;
    }

    /**
     * The resource to enlist in transactions on this connection; always the same one.
     *
     * <p>It is serializable, for transaction managers that write resources to their logs. A resource from a log
     * completes branches through any connection of its process with the same address, virtual host and user. The log
     * has no password.
     */
    public XAResource getXAResource() {
        return resource;
    }

    /** Close the connection. Prepared branches stay; an associated branch is rolled back. */
    @Override
    public synchronized void close() {
        closed = true;
        if (connection != null) {
            connection.abort();
        }
    }

    /** User, address and virtual host: connections with the same value can complete the same branches. */
    String resourceManager() {
        return factory.getUsername() + "@" + factory.getHost() + ":" + factory.getPort() + "/" + factory.getVirtualHost();
    }

    /** Whether both are connected to the same dtx of several active ones. It connects those that are not connected. */
    boolean hasMemberOf(DtxXAConnection other) {
        try {
            return this == other || member().equals(other.member());
        } catch (IOException unreachable) {
            return false; // separate branches are always right
        }
    }

    private synchronized String member() throws IOException {
        Object member = connected().getServerProperties().get("dtx_member");
        return member == null ? "" : member.toString();
    }

    /** The channel for work if it is open, else {@code null}. It opens no channel. */
    synchronized Channel workNow() {
        return work != null && work.isOpen() ? work : null;
    }

    /** The branch that the channel for work is associated with, even if it was closed since; {@code null} if none. */
    synchronized DtxXid associated() {
        return associated;
    }

    /** Set the branch that the channel for work is associated with; {@code null} for none. */
    synchronized void associate(DtxXid branch) {
        associated = branch;
    }

    /** Make a call on the channel for work. */
    DtxAnswer demarcate(Channel channel, DtxMethod request) throws DtxXAException {
        return call(channel, request);
    }

    /** Make a call on the channel for the second phase and recovery. */
    DtxAnswer coordinate(DtxMethod request) throws DtxXAException {
        synchronized (coordinating) {
            return call(coordination(request), request);
        }
    }

    /** Whether the next call would use the channel of a recovery scan, so that the scan can go on. */
    boolean scanLives(Object channel) {
        synchronized (coordinating) {
            return channel != null && channel == coordination && coordination.isOpen();
        }
    }

    /** The channel of recovery scans. */
    Object scanChannel() {
        synchronized (coordinating) {
            return coordination;
        }
    }

    private Channel coordination(DtxMethod request) throws DtxXAException {
        if (coordination == null || !coordination.isOpen()) {
            try {
                synchronized (this) {
                    coordination = open();
                }
            } catch (IOException unreachable) {
                throw notAsked(request, unreachable);
            }
        }
        return coordination;
    }

    private Connection connected() throws IOException {
        if (closed) {
            throw new IOException("this DtxXAConnection is closed");
        }
        if (connection == null || !connection.isOpen()) {
            connection = connect();
        }
        return connection;
    }

    private Channel open() throws IOException {
        Connection open = connected();
        try {
            Channel channel = open.createChannel();
            if (channel == null) {
                throw new IOException("dtx allows no further channel on this connection");
            }
            return channel;
        } catch (AlreadyClosedException lost) {
            throw new IOException(lost);
        }
    }

    private Connection connect() throws IOException {
        Connection fresh;
        try {
            fresh = factory.newConnection();
        } catch (TimeoutException late) {
            throw new IOException("no answer from " + factory.getHost() + ":" + factory.getPort(), late);
        } catch (PossibleAuthenticationFailureException refused) {
            throw new IOException(
                    "the login as " + factory.getUsername() + " at " + factory.getHost() + ":" + factory.getPort()
                            + " was refused: " + refused.getMessage(),
                    refused);
        }
        Object capabilities = fresh.getServerProperties().get("capabilities");
        if (!(capabilities instanceof Map) || !Boolean.TRUE.equals(((Map<?, ?>) capabilities).get("dtx"))) {
            fresh.abort();
            throw new IOException(
                    "the server at " + factory.getHost() + ":" + factory.getPort()
                            + " is not dtx: connect to dtx's port instead of the broker's");
        }
        return fresh;
    }

    private DtxAnswer call(Channel channel, DtxMethod request) throws DtxXAException {
        Command answer;
        try {
            answer = channel.rpc(request);
        } catch (IOException | ShutdownSignalException failed) {
            // A late answer on this channel belongs to this call: another call must not get it.
            abandon(channel);
            throw translated(request, failed);
        }
        return DtxAnswer.in(answer, request);
    }

    /** Close a channel after a failed call. */
    static void abandon(Channel channel) {
        if (channel.isOpen()) {
            try {
                channel.abort(CHANNEL_ERROR, "a call was given up");
            } catch (IOException alreadyGone) {
                return;
            }
        }
    }

    /** The XA exception for a channel exception or a lost connection. */
    private static DtxXAException translated(DtxMethod request, Exception failed) {
        for (Throwable cause = failed; cause != null; cause = cause.getCause()) {
            if (cause instanceof ShutdownSignalException) {
                Object reason = ((ShutdownSignalException) cause).getReason();
                if (reason instanceof AMQP.Channel.Close) {
                    AMQP.Channel.Close close = (AMQP.Channel.Close) reason;
                    if (close.getClassId() == request.protocolClassId()) {
                        return DtxXAException.answered(
                                code(request, close.getReplyCode()),
                                request.describe(),
                                close.getReplyText(),
                                close.getReplyCode(),
                                failed);
                    }
                }
            }
        }
        return outOfReach(request, failed);
    }

    /** The exception for a call that was not sent, because there is no connection. It has changed no outcome. */
    static DtxXAException notAsked(DtxMethod request, IOException unreachable) {
        return new DtxXAException(
                XAException.XAER_RMFAIL, request.describe() + ": " + unreachable.getMessage(), 0, unreachable);
    }

    private static DtxXAException outOfReach(DtxMethod request, Exception failed) {
        Throwable root = failed;
        while (root.getCause() != null) {
            root = root.getCause();
        }
        return new DtxXAException(
                XAException.XAER_RMFAIL, request.describe() + ": the outcome is not known: " + root.getMessage(), 0, failed);
    }

    private static int code(DtxMethod request, int replyCode) {
        switch (replyCode) {
            case AMQP.NOT_FOUND:
                return XAException.XAER_NOTA;
            case AMQP.PRECONDITION_FAILED:
                return XAException.XAER_OUTSIDE;
            case AMQP.SYNTAX_ERROR:
            case AMQP.NOT_IMPLEMENTED:
                return XAException.XAER_INVAL;
            case AMQP.COMMAND_INVALID:
                return XAException.XAER_PROTO;
            case AMQP.NOT_ALLOWED:
                return XAException.XAER_DUPID;
            case AMQP.INTERNAL_ERROR:
                // XAER_RMERR of X/Open's xa_commit means that the work is rolled back; here the decision stands.
                return request.isSecondPhase() ? XAException.XAER_RMFAIL : XAException.XAER_RMERR;
            default:
                return XAException.XAER_RMERR;
        }
    }
}
