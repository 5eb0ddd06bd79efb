import com.arjuna.ats.arjuna.common.CoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.ObjectStoreEnvironmentBean;
import com.arjuna.ats.arjuna.common.RecoveryEnvironmentBean;
import com.arjuna.ats.arjuna.recovery.RecoveryManager;
import com.arjuna.ats.internal.arjuna.recovery.AtomicActionRecoveryModule;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTANodeNameXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.JTATransactionLogXAResourceOrphanFilter;
import com.arjuna.ats.internal.jta.recovery.arjunacore.XARecoveryModule;
import com.arjuna.ats.jta.common.JTAEnvironmentBean;
import com.arjuna.ats.jta.recovery.XAResourceRecoveryHelper;
import com.arjuna.common.internal.util.propertyservice.BeanPopulator;
import com.rabbitmq.client.MessageProperties;
import dtx.client.DtxConnectionFactory;
import dtx.client.DtxXAConnection;
import jakarta.transaction.TransactionManager;
import java.nio.charset.StandardCharsets;
import java.sql.Connection;
import java.sql.ResultSet;
import java.sql.Statement;
import java.util.List;
import javax.sql.XAConnection;
import javax.transaction.xa.XAResource;
import org.postgresql.xa.PGXADataSource;

/** An order in a table of PostgreSQL and a message in a queue: both or neither, with Narayana. */
public final class OrderNarayana {
    private OrderNarayana() {}

    public static void main(String[] words) throws Exception {
        configure("1", words[0]);
        PGXADataSource orders = new PGXADataSource();
        orders.setUrl(words[2]);
        orders.setUser(words[3]);
        orders.setPassword(words[4]);
        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[1]);
        DtxXAConnection recovery = new DtxXAConnection(factory); // recovery has a connection of its own
        XAConnection database = orders.getXAConnection();

        RecoveryManager manager = RecoveryManager.manager(RecoveryManager.DIRECT_MANAGEMENT);
        XARecoveryModule.getRegisteredXARecoveryModule().addXAResourceRecoveryHelper(
                helper(recovery.getXAResource(), database.getXAResource()));
        manager.scan(); // completes decided branches of an earlier process
        manager.startRecoveryManagerThread();

        XAConnection work = orders.getXAConnection();
        try (DtxXAConnection messages = new DtxXAConnection(factory)) {
            messages.getChannel().queueDeclare("shipping", true, false, false, null);
            try (Connection connection = work.getConnection(); Statement statement = connection.createStatement()) {
                statement.execute("CREATE TABLE IF NOT EXISTS orders (id serial PRIMARY KEY, item text NOT NULL)");
            }
            System.out.printf("order %d is placed, and on its way to the warehouse%n", place(work, messages));
        } finally {
            manager.terminate();
            work.close();
            database.close();
            recovery.close();
        }
    }

    /** Store an order and tell the warehouse; its number. */
    private static int place(XAConnection work, DtxXAConnection messages) throws Exception {
        TransactionManager transactions = com.arjuna.ats.jta.TransactionManager.transactionManager();
        transactions.begin();
        try {
            if (!transactions.getTransaction().enlistResource(work.getXAResource())
                    || !transactions.getTransaction().enlistResource(messages.getXAResource())) {
                throw new IllegalStateException("a resource is out of reach");
            }
            int number;
            try (Connection connection = work.getConnection(); Statement statement = connection.createStatement();
                    ResultSet found = statement.executeQuery("INSERT INTO orders (item) VALUES ('tea') RETURNING id")) {
                found.next();
                number = found.getInt(1);
            }
            byte[] body = Integer.toString(number).getBytes(StandardCharsets.UTF_8);
            messages.getChannel().basicPublish("", "shipping", MessageProperties.PERSISTENT_BASIC, body);
            transactions.commit();
            return number;
        } catch (Exception error) {
            if (transactions.getTransaction() != null) {
                transactions.rollback();
            }
            throw error;
        }
    }

    private static void configure(String node, String directory) throws Exception {
        BeanPopulator.getDefaultInstance(CoreEnvironmentBean.class).setNodeIdentifier(node); // part of every xid
        for (String store : new String[] {null, "communicationStore", "stateStore"}) {
            BeanPopulator.getNamedInstance(ObjectStoreEnvironmentBean.class, store).setObjectStoreDir(directory);
        }
        RecoveryEnvironmentBean recovery = BeanPopulator.getDefaultInstance(RecoveryEnvironmentBean.class);
        recovery.setRecoveryModuleClassNames(
                List.of(AtomicActionRecoveryModule.class.getName(), XARecoveryModule.class.getName()));
        recovery.setRecoveryBackoffPeriod(1);
        JTAEnvironmentBean jta = BeanPopulator.getDefaultInstance(JTAEnvironmentBean.class);
        jta.setXaRecoveryNodes(List.of(node));
        jta.setXaResourceOrphanFilterClassNames(List.of(
                JTATransactionLogXAResourceOrphanFilter.class.getName(),
                JTANodeNameXAResourceOrphanFilter.class.getName()));
    }

    private static XAResourceRecoveryHelper helper(XAResource... resources) {
        return new XAResourceRecoveryHelper() {
            @Override public boolean initialise(String words) { return true; }
            @Override public XAResource[] getXAResources() { return resources; }
        };
    }
}
