/*
 * One order: a message from the queue "orders" and a message to "shipping", in one transaction of Enduro/X.
 *
 *   cc -Ibuild/xa_switch -I$NDRX_HOME/include order_endurox.c -o order_endurox -Lbuild/xa_switch -ldtx_xa_switch \
 *       -L$NDRX_HOME/lib -latmiclt -latmi -lubf -lnstd -lrt -ldl -lm -lpthread
 *   ./order_endurox [abort]
 */
#include <atmi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dtx_xa.h"

static void check(const char *call, int done)
{
    if (!done) {
        fprintf(stderr, "%s: %s; %s\n", call, tpstrerror(tperrno), dtx_reason());
        exit(1);
    }
}

int main(int count, char **words)
{
    int undo = count > 1 && strcmp(words[1], "abort") == 0;
    struct dtx_message message;
    char item[256];

    check("tpopen", tpopen() == 0);
    check("tpbegin", tpbegin(60, 0) == 0);
    check("dtx_get", dtx_get("orders", item, sizeof item, &message) == XA_OK);
    check("dtx_ack", dtx_ack(message.delivery_tag) == XA_OK);
    check("dtx_publish", dtx_publish("", "shipping", item, message.length, NULL) == XA_OK);
    if (undo)
        check("tpabort", tpabort(0) == 0);
    else
        check("tpcommit", tpcommit(0) == 0);
    check("tpclose", tpclose() == 0);
    tpterm();
    printf("%s: %.*s\n", undo ? "rolled back" : "committed", (int)message.length, item);
    return 0;
}
