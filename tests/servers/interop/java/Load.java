import com.rabbitmq.client.MessageProperties;
import dtx.client.DtxConnectionFactory;
import dtx.client.DtxXAConnection;
import dtx.client.DtxXid;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.CyclicBarrier;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadLocalRandom;
import javax.transaction.xa.XAResource;
import javax.transaction.xa.Xid;

/**
 * Two-phase transactions of several threads, with one message each: {@code Load DTX-URL QUEUE THREADS SECONDS} prints
 * the number of transactions a second. Each thread has its own connection and warms up for one second.
 */
public final class Load implements Callable<Long> {
    private static final byte[] BODY = new byte[100];

    private final String[] words;
    private final CyclicBarrier barrier;

    private Load(String[] words, CyclicBarrier barrier) {
        this.words = words;
        this.barrier = barrier;
    }

    public static void main(String[] words) throws Exception {
        int threads = Integer.parseInt(words[2]);
        double seconds = Double.parseDouble(words[3]);
        ExecutorService pool = Executors.newFixedThreadPool(threads);
        CyclicBarrier barrier = new CyclicBarrier(threads);
        List<Future<Long>> counts = new ArrayList<>();
        for (int thread = 0; thread < threads; thread++) {
            counts.add(pool.submit(new Load(words, barrier)));
        }
        long total = 0;
        for (Future<Long> count : counts) {
            total += count.get();
        }
        pool.shutdown();
        System.out.println(total / seconds);
    }

    @Override
    public Long call() throws Exception {
        DtxConnectionFactory factory = new DtxConnectionFactory();
        factory.setUri(words[0]);
        try (DtxXAConnection connection = new DtxXAConnection(factory)) {
            perform(connection, 1);
            barrier.await();
            return perform(connection, Double.parseDouble(words[3]));
        }
    }

    private long perform(DtxXAConnection connection, double seconds) throws Exception {
        XAResource resource = connection.getXAResource();
        long count = 0;
        for (long end = System.nanoTime() + (long) (seconds * 1e9); System.nanoTime() < end; count++) {
            byte[] gtrid = ByteBuffer.allocate(16)
                    .putLong(ThreadLocalRandom.current().nextLong())
                    .putLong(System.nanoTime())
                    .array();
            Xid xid = new DtxXid(7, gtrid, new byte[] {'q'});
            resource.start(xid, XAResource.TMNOFLAGS);
            connection.getChannel().basicPublish("", words[1], MessageProperties.PERSISTENT_BASIC, BODY);
            resource.end(xid, XAResource.TMSUCCESS);
            resource.prepare(xid);
            resource.commit(xid, false);
        }
        return count;
    }
}
