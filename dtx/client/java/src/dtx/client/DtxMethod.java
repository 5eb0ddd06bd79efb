package dtx.client;

import com.rabbitmq.client.LongString;
import com.rabbitmq.client.impl.AMQImpl;
import com.rabbitmq.client.impl.LongStringHelper;
import com.rabbitmq.client.impl.Method;
import com.rabbitmq.client.impl.MethodArgumentWriter;
import java.io.IOException;
import javax.transaction.xa.Xid;

/**
 * A request of the classes dtx-demarcation (101) and dtx-coordination (105) that the RabbitMQ client can send.
 *
 * <p>The arguments are ticket, xid, then bits or a number. {@code get-timeout} has no ticket, {@code recover} no xid.
 */
final class DtxMethod extends Method {
    static final int DEMARCATION = 101;
    static final int COORDINATION = 105;

    private final int classId;
    private final int methodId;
    private final String name;
    private final Xid xid;
    private final Arguments rest;

    private interface Arguments {
        void writeTo(MethodArgumentWriter writer) throws IOException;
    }

    private DtxMethod(int classId, int methodId, String name, Xid xid, Arguments rest) {
        this.classId = classId;
        this.methodId = methodId;
        this.name = name;
        this.xid = xid;
        this.rest = rest;
    }

    static DtxMethod select() {
        return new DtxMethod(DEMARCATION, 10, "select", null, writer -> { });
    }

    static DtxMethod start(Xid xid, boolean join, boolean resume) {
        return branch(DEMARCATION, 20, "start", xid, writer -> {
            writer.writeBit(join);
            writer.writeBit(resume);
        });
    }

    static DtxMethod end(Xid xid, boolean fail, boolean suspend) {
        return branch(DEMARCATION, 30, "end", xid, writer -> {
            writer.writeBit(fail);
            writer.writeBit(suspend);
        });
    }

    static DtxMethod commit(Xid xid, boolean onePhase) {
        return branch(COORDINATION, 10, "commit", xid, writer -> writer.writeBit(onePhase));
    }

    static DtxMethod forget(Xid xid) {
        return branch(COORDINATION, 20, "forget", xid, writer -> { });
    }

    static DtxMethod prepare(Xid xid) {
        return branch(COORDINATION, 40, "prepare", xid, writer -> { });
    }

    /** {@code endscan} is a long in the specification, not a bit. */
    static DtxMethod recover(boolean startscan, boolean endscan) {
        return new DtxMethod(COORDINATION, 50, "recover", null, writer -> {
            writer.writeShort(0);
            writer.writeBit(startscan);
            writer.writeLong(endscan ? 1 : 0);
        });
    }

    static DtxMethod rollback(Xid xid) {
        return branch(COORDINATION, 60, "rollback", xid, writer -> { });
    }

    static DtxMethod setTimeout(Xid xid, int seconds) {
        return branch(COORDINATION, 70, "set-timeout", xid, writer -> writer.writeLong(seconds));
    }

    private static DtxMethod branch(int classId, int methodId, String name, Xid xid, Arguments rest) {
        LongString wire = LongStringHelper.asLongString(DtxXid.toWire(xid));
        return new DtxMethod(classId, methodId, name, xid, writer -> {
            writer.writeShort(0);
            writer.writeLongstr(wire);
            rest.writeTo(writer);
        });
    }

    /** Text for messages: {@code commit of 1:6774:62}. */
    String describe() {
        return xid == null ? name : name + " of " + DtxXid.text(xid);
    }

    /** Whether X/Open lets a transaction manager read XAER_RMERR of this request as "the work is rolled back". */
    boolean isSecondPhase() {
        return classId == COORDINATION && (methodId == 10 || methodId == 20 || methodId == 60);
    }

    /** Class and method of its answer, as in the first four octets of the payload. */
    int answer() {
        return classId << 16 | methodId + 1;
    }

    @Override
    public int protocolClassId() {
        return classId;
    }

    @Override
    public int protocolMethodId() {
        return methodId;
    }

    @Override
    public String protocolMethodName() {
        return (classId == DEMARCATION ? "dtx-demarcation." : "dtx-coordination.") + name;
    }

    @Override
    public boolean hasContent() {
        return false;
    }

    @Override
    public Object visit(AMQImpl.MethodVisitor visitor) {
        throw new UnsupportedOperationException(protocolMethodName() + " is no method of AMQP 0-9-1");
    }

    @Override
    public void writeArgumentsTo(MethodArgumentWriter writer) throws IOException {
        rest.writeTo(writer);
    }
}
