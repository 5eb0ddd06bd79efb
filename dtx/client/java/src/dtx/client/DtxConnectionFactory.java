package dtx.client;

import com.rabbitmq.client.ConnectionFactory;
import com.rabbitmq.client.impl.FrameHandler;
import com.rabbitmq.client.impl.FrameHandlerFactory;
import com.rabbitmq.client.impl.Frame;
import com.rabbitmq.client.impl.SocketFrameHandlerFactory;
import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Proxy;
import java.net.URI;
import java.net.URISyntaxException;
import java.security.KeyManagementException;
import java.security.NoSuchAlgorithmException;

/**
 * The factory of the RabbitMQ client, for connections to dtx. Set host, user, TLS and so on as usual.
 *
 * <p>Automatic recovery is off and cannot be switched on: a recovered channel would have lost its branch without an
 * error. {@link DtxXAConnection} connects again where that is safe.
 */
public class DtxConnectionFactory extends ConnectionFactory {
    /** A factory with the client's defaults, without automatic recovery. */
    public DtxConnectionFactory() {
        super.setAutomaticRecoveryEnabled(false);
        super.setTopologyRecoveryEnabled(false);
    }

    /**
     * Like the client's method, except that {@code amqp://host/} means the virtual host {@code /}, as for dtx's clients
     * in other languages. The client would use a virtual host with an empty name, which does not exist.
     */
    @Override
    public void setUri(URI uri) throws URISyntaxException, NoSuchAlgorithmException, KeyManagementException {
        super.setUri(uri);
        if ("/".equals(uri.getRawPath())) {
            setVirtualHost(DEFAULT_VHOST);
        }
    }

    /**
     * @throws IllegalArgumentException {@code automaticRecovery} is true
     */
    @Override
    public void setAutomaticRecoveryEnabled(boolean automaticRecovery) {
        if (automaticRecovery) {
            throw new IllegalArgumentException("recovery must stay off: a recovered channel has lost its branch");
        }
    }

    /**
     * @throws IOException the client is configured for NIO, or for Netty in later versions: answers of dtx can only be
     *     wrapped where frames are read from a stream
     */
    @Override
    protected synchronized FrameHandlerFactory createFrameHandlerFactory() throws IOException {
        FrameHandlerFactory plain = super.createFrameHandlerFactory();
        if (!(plain instanceof SocketFrameHandlerFactory)) {
            throw new IOException("a connection to dtx needs plain sockets: do not call useNio() or netty()");
        }
        return (address, name) -> mapped(plain.create(address, name));
    }

    /** A proxy, because the interface of frame handlers has more methods in later versions of the client. */
    private static FrameHandler mapped(FrameHandler plain) {
        return (FrameHandler) Proxy.newProxyInstance(
                FrameHandler.class.getClassLoader(),
                new Class<?>[] {FrameHandler.class},
                (proxy, method, arguments) -> {
                    try {
                        Object result = method.invoke(plain, arguments);
                        return result instanceof Frame ? DtxAnswer.readable((Frame) result) : result;
                    } catch (InvocationTargetException thrown) {
                        throw thrown.getCause();
                    }
                });
    }
}
