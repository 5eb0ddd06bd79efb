package dtx.client;

import com.rabbitmq.client.AMQP;
import com.rabbitmq.client.Command;
import com.rabbitmq.client.LongString;
import com.rabbitmq.client.impl.Frame;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import javax.transaction.xa.Xid;

/**
 * An answer of the classes 101 and 105, wrapped for a client that does not know them.
 *
 * <p>The RabbitMQ client reads only the methods of AMQP 0-9-1 and closes the connection after any other. So the frame
 * handler wraps the bytes of such an answer in a method that the client knows: {@code connection.secure}. Its only
 * argument is a string of any length, and on a channel only the caller that waits for the answer reads it.
 */
final class DtxAnswer {
    private static final int SECURE = 10 << 16 | 20;
    private static final int HEAD = 8;

    private final ByteBuffer payload;

    private DtxAnswer(byte[] payload) {
        this.payload = ByteBuffer.wrap(payload);
    }

    /** {@code frame} itself; if it is an answer of dtx, the wrapped frame. */
    static Frame readable(Frame frame) {
        if (frame == null || frame.type != AMQP.FRAME_METHOD) {
            return frame;
        }
        byte[] payload = frame.getPayload();
        if (payload.length < 4 || payload[0] != 0
                || payload[1] != DtxMethod.DEMARCATION && payload[1] != DtxMethod.COORDINATION) {
            return frame;
        }
        ByteBuffer wrapped = ByteBuffer.allocate(HEAD + payload.length);
        wrapped.putInt(SECURE).putInt(payload.length).put(payload);
        return new Frame(frame.type, frame.channel, wrapped.array());
    }

    /**
     * The answer to {@code request}.
     *
     * @throws DtxXAException XAER_RMERR: the command is no answer to it
     */
    static DtxAnswer in(Command command, DtxMethod request) throws DtxXAException {
        if (command.getMethod() instanceof AMQP.Connection.Secure) {
            LongString challenge = ((AMQP.Connection.Secure) command.getMethod()).getChallenge();
            DtxAnswer answer = new DtxAnswer(challenge.getBytes());
            if (answer.payload.remaining() >= 4 && answer.payload.getInt(0) == request.answer()) {
                return answer;
            }
        }
        throw new DtxXAException(
                DtxXAException.XAER_RMERR, request.describe() + " was answered by " + command.getMethod());
    }

    /** xa-ok, xa-rdonly or another flag of the specification; -1 if the answer has none. */
    int flags() {
        return payload.remaining() >= 6 ? payload.getShort(4) & 0xffff : -1;
    }

    /**
     * The xids of recover-ok: the entry {@code xids} of a field table, each wire form after an octet with its length.
     *
     * @throws DtxXAException XAER_RMERR: malformed
     */
    List<Xid> xids() throws DtxXAException {
        List<Xid> found = new ArrayList<>();
        try {
            ByteBuffer table = payload.duplicate();
            table.position(4);
            table.limit(8 + table.getInt());
            while (table.hasRemaining()) {
                byte[] key = new byte[table.get() & 0xff];
                table.get(key);
                int type = table.get();
                if (type != 'S' && type != 'x') {
                    throw new IllegalArgumentException("an entry of type " + (char) type);
                }
                byte[] value = new byte[table.getInt()];
                table.get(value);
                if ("xids".equals(new String(key, StandardCharsets.US_ASCII))) {
                    for (int from = 0; from < value.length; from += 1 + (value[from] & 0xff)) {
                        found.add(DtxXid.fromWire(value, from + 1, value[from] & 0xff));
                    }
                }
            }
        } catch (RuntimeException malformed) {
            throw new DtxXAException(DtxXAException.XAER_RMERR, "recover-ok is malformed: " + malformed, 0, malformed);
        }
        return found;
    }
}
