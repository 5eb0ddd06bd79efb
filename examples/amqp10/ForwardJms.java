import jakarta.jms.Connection;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import org.apache.qpid.jms.JmsConnectionFactory;

/** Moves messages from one queue to another with Qpid JMS, each in a transaction. */
public final class ForwardJms {
    private static final long MILLISECONDS = 10_000;

    private ForwardJms() {
    }

    /** The words are: amqp://HOST:PORT, user, password, source queue, target queue, number of messages. */
    public static void main(String[] words) throws Exception {
        JmsConnectionFactory factory = new JmsConnectionFactory(words[1], words[2], words[0]);
        try (Connection connection = factory.createConnection();
                Session session = connection.createSession(Session.SESSION_TRANSACTED)) {
            MessageConsumer consumer = session.createConsumer(session.createQueue(words[3]));
            MessageProducer producer = session.createProducer(session.createQueue(words[4]));
            connection.start();
            for (int left = Integer.parseInt(words[5]); left > 0; left--) {
                Message message = consumer.receive(MILLISECONDS);
                if (message == null) {
                    throw new IllegalStateException("no message in " + MILLISECONDS + " ms");
                }
                producer.send(message);
                session.commit(); // throws TransactionRolledBackException if nothing was committed
            }
        }
    }
}
