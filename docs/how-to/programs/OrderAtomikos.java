import com.atomikos.datasource.xa.XATransactionalResource;
import com.atomikos.icatch.config.Configuration;
import com.atomikos.icatch.jta.UserTransactionManager;
import com.atomikos.jdbc.AtomikosDataSourceBean;
import com.rabbitmq.client.MessageProperties;
import dtx.client.DtxConnectionFactory;
import dtx.client.DtxXAConnection;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.Statement;
import javax.transaction.xa.XAResource;
import org.postgresql.xa.PGXADataSource;

/** An order in a table of PostgreSQL and a message in a queue: both or neither, with Atomikos. */
public final class OrderAtomikos {
    private OrderAtomikos() {}

    public static void main(String[] words) throws Exception {
        System.setProperty("com.atomikos.icatch.log_base_dir", words[0]);
        System.setProperty("com.atomikos.icatch.tm_unique_name", "shop-1"); // part of every xid
        System.setProperty("com.atomikos.icatch.throw_on_heuristic", "true");

        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[1]);
        DtxXAConnection recovery = new DtxXAConnection(factory); // recovery has a connection of its own
        Configuration.addResource(new XATransactionalResource("messages") { // before Atomikos starts
            @Override
            protected XAResource refreshXAConnection() {
                return recovery.getXAResource();
            }
        });

        PGXADataSource database = new PGXADataSource();
        database.setUrl(words[2]);
        database.setUser(words[3]);
        database.setPassword(words[4]);
        AtomikosDataSourceBean orders = new AtomikosDataSourceBean();
        orders.setUniqueResourceName("orders");
        orders.setXaDataSource(database);
        orders.setPoolSize(5);
        orders.setLocalTransactionMode(true); // for the table, which is made before

        UserTransactionManager manager = new UserTransactionManager();
        manager.init();
        try (DtxXAConnection messages = new DtxXAConnection(factory)) {
            messages.getChannel().queueDeclare("shipping", true, false, false, null);
            try (Connection connection = orders.getConnection(); Statement statement = connection.createStatement()) {
                statement.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)");
            }
            int number = place(manager, orders, messages);
            System.out.printf("order %d is placed, and on its way to the warehouse%n", number);
        } finally {
            manager.close();
            orders.close();
            recovery.close();
        }
    }

    /** Store an order and tell the warehouse; its number. */
    private static int place(UserTransactionManager manager, AtomikosDataSourceBean orders, DtxXAConnection messages)
            throws Exception {
        manager.begin();
        try {
            int number;
            try (Connection connection = orders.getConnection(); Statement statement = connection.createStatement();
                    ResultSet found = statement.executeQuery("INSERT INTO orders (item) VALUES ('tea') RETURNING id")) {
                found.next();
                number = found.getInt(1);
            }
            manager.getTransaction().enlistResource(messages.getXAResource());
            byte[] body = Integer.toString(number).getBytes(StandardCharsets.UTF_8);
            messages.getChannel().basicPublish("", "shipping", MessageProperties.PERSISTENT_BASIC, body);
            manager.getTransaction().delistResource(messages.getXAResource(), XAResource.TMSUCCESS);
            manager.commit();
            return number;
        } catch (Exception error) {
            if (manager.getTransaction() != null) {
                manager.rollback();
            }
            throw error;
        }
    }
}
