import com.rabbitmq.client.Channel;
import com.rabbitmq.client.GetResponse;
import com.rabbitmq.client.MessageProperties;
import dtx.client.DtxConnectionFactory;
import dtx.client.DtxXAConnection;
import dtx.client.DtxXAException;
import dtx.client.DtxXid;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.ObjectInputStream;
import java.io.ObjectOutputStream;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * Reads calls from stdin, one a line, and prints the result of each: {@code ok VALUE}, {@code xa CODE REPLY TEXT} or
 * {@code error TEXT}. The first word of a line names a connection.
 */
public final class Calls {
    private final Map<String, DtxXAConnection> connections = new HashMap<>();
    private final Map<String, XAResource> loaded = new HashMap<>();
    private final Map<String, Long> unsettled = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        Calls calls = new Calls();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        System.out.println("ok ready");
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            System.out.println(calls.answer(line.split(" ")).replace('\n', ' '));
        }
        System.exit(0);
    }

    private String answer(String[] words) {
        try {
            return "ok " + done(words[0], words[1], Arrays.copyOfRange(words, 2, words.length));
        } catch (DtxXAException raised) {
            return "xa " + raised.errorCode + " " + raised.getReplyCode() + " " + raised.getMessage();
        } catch (XAException foreign) {
            return "error an XAException of another class: " + foreign;
        } catch (Exception failed) {
            return "error " + failed;
        }
    }

    private Object done(String name, String call, String[] words) throws Exception {
        DtxXAConnection connection = connections.get(name);
        switch (call) {
            case "connect":
                connections.put(name, new DtxXAConnection(factory(words)));
                return "";
            case "close":
                connection.close();
                return "";
            case "start":
                resource(name).start(xid(words[0]), Integer.parseInt(words[1]));
                return "";
            case "end":
                resource(name).end(xid(words[0]), Integer.parseInt(words[1]));
                return "";
            case "prepare":
                return resource(name).prepare(xid(words[0]));
            case "commit":
                resource(name).commit(xid(words[0]), words.length > 1);
                return "";
            case "rollback":
                resource(name).rollback(xid(words[0]));
                return "";
            case "forget":
                resource(name).forget(xid(words[0]));
                return "";
            case "recover":
                List<String> found = new ArrayList<>();
                for (Xid xid : resource(name).recover(Integer.parseInt(words[0]))) {
                    found.add(xid.toString());
                }
                return String.join(" ", found);
            case "timeout":
                resource(name).setTransactionTimeout(Integer.parseInt(words[0]));
                return resource(name).getTransactionTimeout();
            case "same":
                return resource(name).isSameRM(resource(words[0]));
            case "publish":
                connection.getChannel().basicPublish(
                        "", words[0], MessageProperties.PERSISTENT_BASIC, words[1].getBytes(StandardCharsets.UTF_8));
                return "";
            case "get":
                GetResponse got = connection.getChannel().basicGet(words[0], false);
                if (got == null) {
                    return "nothing";
                }
                unsettled.put(name, got.getEnvelope().getDeliveryTag());
                return new String(got.getBody(), StandardCharsets.UTF_8);
            case "ack":
                connection.getChannel().basicAck(unsettled.remove(name), false);
                return "";
            case "save":
                ByteArrayOutputStream saved = new ByteArrayOutputStream();
                try (ObjectOutputStream output = new ObjectOutputStream(saved)) {
                    output.writeObject(resource(name));
                }
                return new BigInteger(1, saved.toByteArray()).toString(16);
            case "load":
                byte[] log = new BigInteger(words[0], 16).toByteArray();
                int first = log[0] == 0 ? 1 : 0; // skips the byte of the sign
                ByteArrayInputStream written = new ByteArrayInputStream(log, first, log.length - first);
                try (ObjectInputStream input = new ObjectInputStream(written)) {
                    loaded.put(name, (XAResource) input.readObject());
                }
                return "";
            case "break":
                Channel broken = connection.getChannel();
                broken.getConnection().abort();
                return "";
            default:
                throw new IllegalArgumentException(call);
        }
    }

    private XAResource resource(String name) {
        return loaded.containsKey(name) ? loaded.get(name) : connections.get(name).getXAResource();
    }

    private static DtxConnectionFactory factory(String[] words) throws Exception {
        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[0]);
        if (words.length > 1 && words[1].equals("nio")) {
            factory.useNio();
        } else if (words.length > 1) {
            factory.setRequestedFrameMax(Integer.parseInt(words[1]));
        }
        return factory;
    }

    /** From {@code format:gtrid:bqual}, the last two in hexadecimal. */
    private static Xid xid(String text) {
        String[] parts = text.split(":", -1);
        return new DtxXid(Integer.parseUnsignedInt(parts[0]), octets(parts[1]), octets(parts[2]));
    }

    private static byte[] octets(String hex) {
        byte[] octets = new byte[hex.length() / 2];
        for (int position = 0; position < octets.length; position++) {
            octets[position] = (byte) Integer.parseInt(hex.substring(2 * position, 2 * position + 2), 16);
        }
        return octets;
    }
}
