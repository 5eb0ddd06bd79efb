package dtx.client;

import java.util.Arrays;
import javax.transaction.xa.Xid;

/** An xid, as recovery scans of dtx return it. It equals any other Xid with the same three parts. */
public final class DtxXid implements Xid {
    /** Bytes of a gtrid or bqual at most. */
    private static final int MAX_PART = 64;

    private static final int HEAD = 6;
    private static final char[] HEX = "0123456789abcdef".toCharArray();

    private final int formatId;
    private final byte[] gtrid;
    private final byte[] bqual;

    /**
     * @param formatId the format of gtrid and bqual; unsigned, so -1 is 4294967295
     * @param gtrid global transaction identifier, 1 to 64 bytes, the same in all branches of a transaction
     * @param bqual branch qualifier, 0 to 64 bytes
     * @throws IllegalArgumentException a length is not possible
     */
    public DtxXid(int formatId, byte[] gtrid, byte[] bqual) {
        if (gtrid.length < 1 || gtrid.length > MAX_PART || bqual.length > MAX_PART) {
            throw new IllegalArgumentException(
                    "an xid with a gtrid of " + gtrid.length + " and a bqual of " + bqual.length
                            + " bytes; 1 to 64, and 0 to 64, are possible");
        }
        this.formatId = formatId;
        this.gtrid = gtrid.clone();
        this.bqual = bqual.clone();
    }

    @Override
    public int getFormatId() {
        return formatId;
    }

    @Override
    public byte[] getGlobalTransactionId() {
        return gtrid.clone();
    }

    @Override
    public byte[] getBranchQualifier() {
        return bqual.clone();
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Xid
                && formatId == ((Xid) other).getFormatId()
                && Arrays.equals(gtrid, ((Xid) other).getGlobalTransactionId())
                && Arrays.equals(bqual, ((Xid) other).getBranchQualifier());
    }

    @Override
    public int hashCode() {
        return 31 * (31 * formatId + Arrays.hashCode(gtrid)) + Arrays.hashCode(bqual);
    }

    /** The text form, as {@code dtx branches} prints it: format id, and gtrid and bqual in hexadecimal. */
    @Override
    public String toString() {
        return text(this);
    }

    static String text(Xid xid) {
        return Integer.toUnsignedString(xid.getFormatId())
                + ":" + hex(xid.getGlobalTransactionId())
                + ":" + hex(xid.getBranchQualifier());
    }

    /** The wire form: format id, both lengths, both parts. */
    static byte[] toWire(Xid xid) {
        byte[] gtrid = xid.getGlobalTransactionId();
        byte[] bqual = xid.getBranchQualifier();
        byte[] wire = new byte[HEAD + gtrid.length + bqual.length];
        int formatId = xid.getFormatId();
        for (int position = 0; position < 4; position++) {
            wire[position] = (byte) (formatId >>> 24 - 8 * position);
        }
        // A length above 255 does not fit into its octet; the server refuses 255 (502).
        wire[4] = (byte) Math.min(gtrid.length, 255);
        wire[5] = (byte) Math.min(bqual.length, 255);
        System.arraycopy(gtrid, 0, wire, HEAD, gtrid.length);
        System.arraycopy(bqual, 0, wire, HEAD + gtrid.length, bqual.length);
        return wire;
    }

    /**
     * @throws IllegalArgumentException these bytes are no wire form
     */
    static DtxXid fromWire(byte[] wire, int from, int length) {
        if (length < HEAD || HEAD + (wire[from + 4] & 0xff) + (wire[from + 5] & 0xff) != length) {
            throw new IllegalArgumentException("a malformed xid of " + length + " bytes");
        }
        int formatId = 0;
        for (int position = 0; position < 4; position++) {
            formatId = formatId << 8 | wire[from + position] & 0xff;
        }
        int middle = from + HEAD + (wire[from + 4] & 0xff);
        return new DtxXid(
                formatId,
                Arrays.copyOfRange(wire, from + HEAD, middle),
                Arrays.copyOfRange(wire, middle, from + length));
    }

    private static String hex(byte[] octets) {
        StringBuilder text = new StringBuilder(2 * octets.length);
        for (byte octet : octets) {
            text.append(HEX[octet >> 4 & 0xf]).append(HEX[octet & 0xf]);
        }
        return text.toString();
    }
}
