import bitronix.tm.BitronixTransactionManager;
import bitronix.tm.Configuration;
import bitronix.tm.TransactionManagerServices;
import bitronix.tm.resource.ehcache.EhCacheXAResourceProducer;
import bitronix.tm.resource.jdbc.PoolingDataSource;
import com.rabbitmq.client.MessageProperties;
import dtx.client.DtxConnectionFactory;
import dtx.client.DtxXAConnection;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.Statement;
import javax.transaction.xa.XAResource;

/**
 * An order in a table of PostgreSQL and a message in a queue, in one transaction, with Bitronix.
 *
 * <pre>
 *   make java
 *   apt install libbtm-java libpostgresql-jdbc-java librabbitmq-client-java libgeronimo-jta-1.2-spec-java libslf4j-java
 *   CLASSPATH="build/java/dtx-client.jar:$(printf '/usr/share/java/%s.jar:' \
 *       btm postgresql amqp-client geronimo-jta-1.2-spec slf4j-api slf4j-nop)" \
 *       java examples/java/OrderBitronix.java JOURNAL-DIRECTORY amqp://guest:guest@127.0.0.1:5673/ \
 *       jdbc:postgresql://127.0.0.1/orders USER PASSWORD
 * </pre>
 *
 * <p>PostgreSQL needs max_prepared_transactions &gt; 0. You can kill the program at any moment and start it again with
 * the same directory: Bitronix completes its open transactions before it begins a new one.
 */
public final class OrderBitronix {
    private final BitronixTransactionManager manager;
    private final PoolingDataSource orders;
    private final DtxXAConnection messages;

    OrderBitronix(BitronixTransactionManager manager, PoolingDataSource orders, DtxXAConnection messages) {
        this.manager = manager;
        this.orders = orders;
        this.messages = messages;
    }

    public static void main(String[] words) throws Exception {
        Configuration settings = TransactionManagerServices.getConfiguration();
        settings.setServerId("shop-1"); // part of every xid: recovery changes no other branches
        settings.setLogPart1Filename(words[0] + "/part1.tlog");
        settings.setLogPart2Filename(words[0] + "/part2.tlog");
        settings.setDisableJmx(true);

        PoolingDataSource orders = new PoolingDataSource();
        orders.setUniqueName("orders");
        orders.setClassName("org.postgresql.xa.PGXADataSource");
        orders.getDriverProperties().setProperty("url", words[2]);
        orders.getDriverProperties().setProperty("user", words[3]);
        orders.getDriverProperties().setProperty("password", words[4]);
        orders.setMaxPoolSize(5);
        orders.setAllowLocalTransactions(true); // for the creation of the table
        orders.init();

        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[1]);
        try (DtxXAConnection messages = new DtxXAConnection(factory)) {
            messages.getChannel().queueDeclare("shipping", true, false, false, null);
            EhCacheXAResourceProducer.registerXAResource("messages", messages.getXAResource()); // before recovery
            BitronixTransactionManager manager = TransactionManagerServices.getTransactionManager();
            try {
                OrderBitronix shop = new OrderBitronix(manager, orders, messages);
                shop.makeTable();
                System.out.printf("order %d is placed, and on its way to the warehouse%n", shop.place("tea"));
            } finally {
                manager.shutdown();
                orders.close();
            }
        }
    }

    private void makeTable() throws Exception {
        try (Connection connection = orders.getConnection(); Statement statement = connection.createStatement()) {
            statement.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)");
        }
    }

    /** Store an order and send a message to the warehouse. Return the number of the order. */
    private int place(String item) throws Exception {
        manager.begin();
        try {
            int number = store(item);
            manager.getTransaction().enlistResource(messages.getXAResource());
            byte[] body = Integer.toString(number).getBytes(StandardCharsets.UTF_8);
            messages.getChannel().basicPublish("", "shipping", MessageProperties.PERSISTENT_BASIC, body);
            manager.getTransaction().delistResource(messages.getXAResource(), XAResource.TMSUCCESS);
            manager.commit();
            return number;
        } catch (Exception error) {
            if (manager.getCurrentTransaction() != null) {
                manager.rollback();
            }
            throw error;
        }
    }

    private int store(String item) throws Exception {
        try (Connection connection = orders.getConnection();
                PreparedStatement insert =
                        connection.prepareStatement("INSERT INTO orders (item) VALUES (?) RETURNING id")) {
            insert.setString(1, item);
            try (ResultSet found = insert.executeQuery()) {
                found.next();
                return found.getInt(1);
            }
        }
    }
}
