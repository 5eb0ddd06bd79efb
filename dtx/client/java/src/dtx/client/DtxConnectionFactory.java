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
 * The RabbitMQ client's factory, for connections to dtx: set host, user, TLS and so on as usual.
 *
 * <p>Automatic recovery is off and stays off: a channel that came back by itself would have lost its branch, and nobody
 * would know. {@link DtxXAConnection} connects again where that is right.
 */
public class DtxConnectionFactory extends ConnectionFactory {
    /** A factory with the client's defaults, without automatic recovery. */
    public DtxConnectionFactory() {
        super.setAutomaticRecoveryEnabled(false);
        super.setTopologyRecoveryEnabled(false);
    }

    /**
     * As the client does it, but for {@code amqp://host/}: that is the virtual host {@code /} here, as for dtx's clients
     * in other languages. The client would ask for one whose name is empty, and there is none.
     */
    @Override
    public void setUri(URI uri) throws URISyntaxException, NoSuchAlgorithmException, KeyManagementException {
        super.setUri(uri);
        if ("/".equals(uri.getRawPath())) {
            setVirtualHost(DEFAULT_VHOST);
        }
    }

    /**
     * @throws IllegalArgumentException it was to be switched on
     */
    @Override
    public void setAutomaticRecoveryEnabled(boolean automaticRecovery) {
        if (automaticRecovery) {
            throw new IllegalArgumentException("a channel that was recovered has lost its branch: leave it off");
        }
    }

    /**
     * @throws IOException the client was told to use NIO, or Netty as its later versions can: answers of dtx are mapped
     *     where frames are read from a stream
     */
    @Override
    protected synchronized FrameHandlerFactory createFrameHandlerFactory() throws IOException {
        FrameHandlerFactory plain = super.createFrameHandlerFactory();
        if (!(plain instanceof SocketFrameHandlerFactory)) {
            throw new IOException("a connection to dtx needs plain sockets: leave useNio() and netty() out");
        }
        return (address, name) -> mapped(plain.create(address, name));
    }

    /** A proxy, since later versions of the client ask more of a frame handler than this one knows of. */
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
