/*
 * One order: a message from the queue "orders", a row in PostgreSQL, and a message to "shipping", in one transaction
 * of LIXA.
 *
 *   cc -Ibuild/xa_switch -I$LIXA/include -I$(pg_config --includedir) order_lixa.c -o order_lixa \
 *       -Lbuild/xa_switch -ldtx_xa_switch -L$LIXA/lib -llixac -llixapq -lpq
 *   LIXA_CONFIG_FILE=lixac_conf.xml LIXA_PROFILE=SHOP ./order_lixa [rollback]
 */
#include <libpq-fe.h>
#include <lixapq.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tx.h>

#include "dtx_xa.h"

static void check(const char *call, int code, int expected)
{
    if (code != expected) {
        fprintf(stderr, "%s: %d %s\n", call, code, dtx_reason());
        exit(1);
    }
}

static void store(PGconn *orders, const char *item)
{
    const char *values[] = {item};
    PGresult *done = PQexecParams(orders, "INSERT INTO orders (item) VALUES ($1)", 1, NULL, values, NULL, NULL, 0);

    if (PQresultStatus(done) != PGRES_COMMAND_OK) {
        fprintf(stderr, "%s", PQerrorMessage(orders));
        exit(1);
    }
    PQclear(done);
}

int main(int count, char **words)
{
    int undo = count > 1 && strcmp(words[1], "rollback") == 0;
    struct dtx_message message;
    char item[256];

    check("tx_open", tx_open(), TX_OK);
    check("tx_begin", tx_begin(), TX_OK);
    check("dtx_get", dtx_get("orders", item, sizeof item - 1, &message), XA_OK);
    item[message.length] = '\0';
    check("dtx_ack", dtx_ack(message.delivery_tag), XA_OK);
    store(lixa_pq_get_conn(), item);
    check("dtx_publish", dtx_publish("", "shipping", item, message.length, NULL), XA_OK);
    if (undo)
        check("tx_rollback", tx_rollback(), TX_OK);
    else
        check("tx_commit", tx_commit(), TX_OK);
    check("tx_close", tx_close(), TX_OK);
    printf("%s: %s\n", undo ? "rolled back" : "committed", item);
    return 0;
}
