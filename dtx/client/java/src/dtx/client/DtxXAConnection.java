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
 * A connection to dtx that takes part in XA transactions: a channel to work with, and the resource that a transaction
 * manager drives.
 *
 * <p>Between {@code start} and {@code end} of its resource, what is published and acknowledged on {@link #getChannel()}
 * belongs to the branch. Outside of these, work on that channel is not transactional. When the channel is closed within
 * a branch, there is no other one before {@code end}: work on it would take effect at once, outside the branch.
 *
 * <p>It connects when it is needed first, and again when the connection was lost: dtx may be restarted at any time, and
 * a branch that was prepared is still there. The channel is another one then, so ask for it with each transaction and
 * begin consumers anew. A call whose answer was lost raises XAER_RMFAIL, and may be repeated.
 *
 * <p>Threads: as a JDBC connection, one transaction at a time. What a resource does for the second phase and for
 * recovery has a channel of its own, so another thread may commit and recover meanwhile.
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
     * @param factory says where dtx is, and who connects; it is not asked before the first use
     */
    public DtxXAConnection(DtxConnectionFactory factory) {
        this.factory = factory;
        synchronized (KNOWN) {
            KNOWN.add(this);
        }
    }

    /** Some connection of this process to {@code resourceManager} that was not closed; {@code null}: there is none. */
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
     * The channel for work. Never close it; after a channel exception outside a branch the next call opens another one.
     *
     * @return an open channel that uses distributed transactions
     * @throws IOException the channel was closed within a branch that has not been ended; or dtx is out of reach, the
     *     server is something else, or the user may not use transactions
     */
    public synchronized Channel getChannel() throws IOException {
        if (work == null || !work.isOpen()) {
            if (associated != null) {
                throw new IOException(
                        "the channel was closed within branch " + associated
                                + ", whose work is undone: end the branch first");
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
     * <p>It is serializable, for managers that write resources to their logs: what is read from a log completes branches
     * through any connection of its process to the same address and virtual host as the same user. The log has no
     * password.
     */
    public XAResource getXAResource() {
        return resource;
    }

    /** Close the connection. Prepared branches stay; a branch that is being worked for is rolled back. */
    @Override
    public synchronized void close() {
        closed = true;
        if (connection != null) {
            connection.abort();
        }
    }

    /** The resource manager at the other end and who asks it: where this is equal, so is what the other can do. */
    String resourceManager() {
        return factory.getUsername() + "@" + factory.getHost() + ":" + factory.getPort() + "/" + factory.getVirtualHost();
    }

    /** The channel for work while it is open, else {@code null}: no new one. */
    synchronized Channel workNow() {
        return work != null && work.isOpen() ? work : null;
    }

    /** The branch that the channel for work is associated with, be it closed by now; {@code null}: none. */
    synchronized DtxXid associated() {
        return associated;
    }

    /** From now on, and until this is called again, the channel for work is associated with {@code branch}. */
    synchronized void associate(DtxXid branch) {
        associated = branch;
    }

    /** A call on the channel for work. */
    DtxAnswer demarcate(Channel channel, DtxMethod request) throws DtxXAException {
        return call(channel, request);
    }

    /** A call on the channel of its own that the second phase and recovery have. */
    DtxAnswer coordinate(DtxMethod request) throws DtxXAException {
        synchronized (coordinating) {
            return call(coordination(request), request);
        }
    }

    /** Whether the channel that a recovery scan belongs to is still the one of the next call. */
    boolean scanLives(Object channel) {
        synchronized (coordinating) {
            return channel != null && channel == coordination && coordination.isOpen();
        }
    }

    /** That channel. */
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

    private Channel open() throws IOException {
        if (closed) {
            throw new IOException("this DtxXAConnection is closed");
        }
        if (connection == null || !connection.isOpen()) {
            connection = connect();
        }
        try {
            Channel channel = connection.createChannel();
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
            // Whatever the channel may hear later belongs to a call that was given up: nobody else may take it.
            abandon(channel);
            throw translated(request, failed);
        }
        return DtxAnswer.in(answer, request);
    }

    /** Close a channel that is not to be used any more. */
    static void abandon(Channel channel) {
        if (channel.isOpen()) {
            try {
                channel.abort(CHANNEL_ERROR, "a call was given up");
            } catch (IOException alreadyGone) {
                return;
            }
        }
    }

    /** The exception that stands for a channel exception, or for a connection that was lost. */
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

    /** There is no connection, so nothing was sent: this call has changed no outcome. */
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
                // X/Open's xa_commit says of XAER_RMERR that the work is rolled back; here it is decided still.
                return request.isSecondPhase() ? XAException.XAER_RMFAIL : XAException.XAER_RMERR;
            default:
                return XAException.XAER_RMERR;
        }
    }
}
