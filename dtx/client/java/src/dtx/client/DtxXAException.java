package dtx.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import javax.transaction.xa.XAException;

/** The exception of an XA call: X/Open's code, and the server's error or the error of the connection. */
public final class DtxXAException extends XAException {
    private static final long serialVersionUID = 1L;

    /** The field of the reply text with the outcome, or the sentence of servers of dtx 0.1. */
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

    /** The exception for the server's channel exception. */
    static DtxXAException answered(int errorCode, String call, String replyText, int replyCode, Throwable cause) {
        Matcher found = ENDING.matcher(replyText);
        String ending = !found.matches() ? null : found.group(1) != null ? found.group(1) : found.group(2);
        return new DtxXAException(errorCode, call + ": " + replyText, replyCode, ending, cause);
    }

    /** The AMQP reply code of the channel exception that caused it; 0 if there was none. */
    public int getReplyCode() {
        return replyCode;
    }

    /** The outcome of an unknown xid ("committed", "rolled-back", ...), if the server knows it; else null. */
    String getEnding() {
        return errorCode == XAER_NOTA ? ending : null;
    }

    private static String name(int number) {
        return Stream.of(Code.values()).filter(code -> code.number == number).map(Code::name).findAny()
                .orElse("XA " + number);
    }

    /** The codes that dtx raises: X/Open's number, and the flag in answers; 0 if no flag means the code. */
    enum Code {
        XA_RBROLLBACK(XAException.XA_RBROLLBACK, 1),
        XA_RBTIMEOUT(XAException.XA_RBTIMEOUT, 2),
        XA_HEURHAZ(XAException.XA_HEURHAZ, 3),
        XA_HEURCOM(XAException.XA_HEURCOM, 4),
        XA_HEURRB(XAException.XA_HEURRB, 5),
        XA_HEURMIX(XAException.XA_HEURMIX, 6),
        XAER_RMERR(XAException.XAER_RMERR, 0),
        XAER_NOTA(XAException.XAER_NOTA, 0),
        XAER_INVAL(XAException.XAER_INVAL, 0),
        XAER_PROTO(XAException.XAER_PROTO, 0),
        XAER_RMFAIL(XAException.XAER_RMFAIL, 0),
        XAER_DUPID(XAException.XAER_DUPID, 0),
        XAER_OUTSIDE(XAException.XAER_OUTSIDE, 0);

        final int number;
        final int flag;

        Code(int number, int flag) {
            this.number = number;
            this.flag = flag;
        }
    }
}
