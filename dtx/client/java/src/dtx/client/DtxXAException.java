package dtx.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.transaction.xa.XAException;

/** What an XA call raises: X/Open's code, and the words of the server or what went wrong on the way to it. */
public final class DtxXAException extends XAException {
    private static final long serialVersionUID = 1L;

    /** A field of the reply text, or the sentence in which servers of dtx 0.1 said the same. */
    private static final Pattern ENDING =
            Pattern.compile("NOT_FOUND - (?:(?:[a-z]+=[^; ]+; )*?ended=([^; ]+); |unknown xid, completed: ([^ ]+) at ).*");

    private final int replyCode;
    private final String ending;

    DtxXAException(int errorCode, String message) {
        this(errorCode, message, 0, null);
    }

    DtxXAException(int errorCode, String message, int replyCode, Throwable cause) {
        this(errorCode, message, replyCode, null, cause);
    }

    private DtxXAException(int errorCode, String message, int replyCode, String ending, Throwable cause) {
        super(name(errorCode) + ": " + message);
        this.errorCode = errorCode;
        this.replyCode = replyCode;
        this.ending = ending;
        initCause(cause);
    }

    /** The server's answer to a call. */
    static DtxXAException answered(int errorCode, String call, String replyText, int replyCode, Throwable cause) {
        Matcher found = ENDING.matcher(replyText);
        String ending = !found.matches() ? null : found.group(1) != null ? found.group(1) : found.group(2);
        return new DtxXAException(errorCode, call + ": " + replyText, replyCode, ending, cause);
    }

    /** The AMQP reply code of the channel exception behind it; 0: there was none. */
    public int getReplyCode() {
        return replyCode;
    }

    /** How the branch ended ("committed", "rolled-back", ...), where the xid is unknown and the server says so; or null. */
    String getEnding() {
        return errorCode == XAER_NOTA ? ending : null;
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
