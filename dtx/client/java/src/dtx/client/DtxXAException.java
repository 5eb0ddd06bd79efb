package dtx.client;

import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
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

    private static String name(int number) {
        return Stream.of(Code.values()).filter(code -> code.number == number).map(Code::name).findAny()
                .orElse("XA " + number);
    }

    /** What dtx raises: X/Open's number, and the flag of an answer that stands for it; 0: none does. */
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
