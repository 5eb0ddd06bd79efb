package dtx.client;

import javax.transaction.xa.XAException;

/** What an XA call raises: X/Open's code, and the words of the server or what went wrong on the way to it. */
public final class DtxXAException extends XAException {
    private static final long serialVersionUID = 1L;

    private final int replyCode;

    DtxXAException(int errorCode, String message) {
        this(errorCode, message, 0, null);
    }

    DtxXAException(int errorCode, String message, int replyCode, Throwable cause) {
        super(name(errorCode) + ": " + message);
        this.errorCode = errorCode;
        this.replyCode = replyCode;
        initCause(cause);
    }

    /** The AMQP reply code of the channel exception behind it; 0: there was none. */
    public int getReplyCode() {
        return replyCode;
    }

    /** Whether the xid is not known any more, and these are the server's words about how it ended. */
    boolean tells(String ending) {
        return errorCode == XAER_NOTA && getMessage().contains(ending);
    }

    private static String name(int code) {
        switch (code) {
            case XA_RBROLLBACK: return "XA_RBROLLBACK";
            case XA_RBTIMEOUT: return "XA_RBTIMEOUT";
            case XA_HEURMIX: return "XA_HEURMIX";
            case XA_HEURRB: return "XA_HEURRB";
            case XA_HEURCOM: return "XA_HEURCOM";
            case XA_HEURHAZ: return "XA_HEURHAZ";
            case XAER_RMERR: return "XAER_RMERR";
            case XAER_NOTA: return "XAER_NOTA";
            case XAER_INVAL: return "XAER_INVAL";
            case XAER_PROTO: return "XAER_PROTO";
            case XAER_RMFAIL: return "XAER_RMFAIL";
            case XAER_DUPID: return "XAER_DUPID";
            case XAER_OUTSIDE: return "XAER_OUTSIDE";
            default: return "XA " + code;
        }
    }
}
