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
import javax.transaction.xa.XAException;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * One order: a row in PostgreSQL and a message in a queue of dtx, in one transaction of Bitronix. At its start Bitronix
 * first recovers what an earlier run left unfinished.
 *
 * <p>{@code Transfer JOURNAL-DIRECTORY DTX-URL JDBC-URL USER PASSWORD QUEUE ORDER [POSITION HALT]}. POSITION is
 * PostgreSQL's place among the resources: 0 before dtx, 2 after it. HALT is where the process halts: before or after a
 * call to dtx, {@code prepare-before}, {@code prepare-after}, {@code commit-before} or {@code commit-after}; with
 * the prefix {@code recovery-} it is a call made by recovery.
 */
public final class Transfer {
    public static void main(String[] words) throws Exception {
        Configuration settings = TransactionManagerServices.getConfiguration();
        settings.setServerId("orders-1"); // part of every xid: recovery touches no others
        settings.setLogPart1Filename(words[0] + "/part1.tlog");
        settings.setLogPart2Filename(words[0] + "/part2.tlog");
        settings.setDisableJmx(true);

        PoolingDataSource orders = new PoolingDataSource();
        orders.setUniqueName("orders");
        orders.setClassName("org.postgresql.xa.PGXADataSource");
        orders.getDriverProperties().setProperty("url", words[2]);
        orders.getDriverProperties().setProperty("user", words[3]);
        orders.getDriverProperties().setProperty("password", words[4]);
        orders.setMaxPoolSize(2);
        orders.setTwoPcOrderingPosition(words.length > 7 ? Integer.parseInt(words[7]) : 0);
        orders.init();

        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[1]);
        DtxXAConnection messages = new DtxXAConnection(factory);
        Halting resource = new Halting(messages.getXAResource(), words.length > 8 ? words[8] : "");
        EhCacheXAResourceProducer.registerXAResource("messages", resource); // it takes any kind of resource

        BitronixTransactionManager manager = TransactionManagerServices.getTransactionManager();
        resource.recovers = false;
        manager.begin();
        try (Connection connection = orders.getConnection();
                PreparedStatement insert = connection.prepareStatement("INSERT INTO orders VALUES (?)")) {
            insert.setString(1, words[6]);
            insert.executeUpdate();
        }
        manager.getTransaction().enlistResource(resource);
        messages.getChannel().basicPublish(
                "", words[5], MessageProperties.PERSISTENT_BASIC, words[6].getBytes(StandardCharsets.UTF_8));
        manager.getTransaction().delistResource(resource, XAResource.TMSUCCESS);
        manager.commit();

        manager.shutdown();
        orders.close();
        messages.close();
        System.out.println("done");
    }

    /** Halts the process at a given point, like a machine that loses its power. */
    private static final class Halting implements XAResource {
        private final XAResource resource;
        private final String point;
        private volatile boolean recovers = true;

        Halting(XAResource resource, String point) {
            this.resource = resource;
            this.point = point;
        }

        private void at(String reached) {
            if (point.equals(recovers ? "recovery-" + reached : reached)) {
                Runtime.getRuntime().halt(86);
            }
        }

        @Override
        public int prepare(Xid xid) throws XAException {
            at("prepare-before");
            int vote = resource.prepare(xid);
            at("prepare-after");
            return vote;
        }

        @Override
        public void commit(Xid xid, boolean onePhase) throws XAException {
            at("commit-before");
            resource.commit(xid, onePhase);
            at("commit-after");
        }

        @Override
        public void start(Xid xid, int flags) throws XAException {
            resource.start(xid, flags);
        }

        @Override
        public void end(Xid xid, int flags) throws XAException {
            resource.end(xid, flags);
        }

        @Override
        public void rollback(Xid xid) throws XAException {
            resource.rollback(xid);
        }

        @Override
        public void forget(Xid xid) throws XAException {
            resource.forget(xid);
        }

        @Override
        public Xid[] recover(int flags) throws XAException {
            return resource.recover(flags);
        }

        @Override
        public boolean isSameRM(XAResource other) throws XAException {
            return other instanceof Halting && resource.isSameRM(((Halting) other).resource);
        }

        @Override
        public int getTransactionTimeout() throws XAException {
            return resource.getTransactionTimeout();
        }

        @Override
        public boolean setTransactionTimeout(int seconds) throws XAException {
            return resource.setTransactionTimeout(seconds);
        }
    }
}
