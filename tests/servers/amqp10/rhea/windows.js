// A client of rhea with three receivers whose messages fill its session's window, and one of them is closed then.
// node windows.js HOST PORT QUEUE...: prints one line of JSON, how many messages the others get; each queue has 1,500.
'use strict';

const rhea = require('rhea');

const [host, port, ...queues] = process.argv.slice(2);
const EACH = 1500; // all of them are more than the window of 2,048 deliveries that rhea has

const connection = rhea.connect({ host, port: Number(port), username: 'guest', password: 'guest', reconnect: false });
const fail = (context) => { console.error(context.connection.error || context.session.error); process.exit(1); };
connection.on('connection_error', fail);
connection.on('session_error', fail);
connection.on('disconnected', (context) => { console.error(context.error); process.exit(1); });
connection.once('connection_open', () => {
    const held = [];
    let closed = false;
    const got = queues.map(() => 0);
    const receivers = queues.map((source) => connection.attach_receiver({ source, credit_window: 0, autoaccept: false }));
    connection.on('message', (context) => {
        got[receivers.indexOf(context.receiver)] += 1;
        if (closed) {
            context.delivery.accept();
        } else if (held.push(context.delivery) === 2000) {
            receivers[1].close();
        }
        if (got[0] === EACH && got[2] === EACH) {
            console.log(JSON.stringify([got[0], got[2]]));
            connection.removeAllListeners('disconnected');
            connection.close();
        }
    });
    connection.on('receiver_close', () => {
        closed = true;
        held.forEach((delivery) => delivery.accept());
    });
    receivers.forEach((receiver) => receiver.add_credit(EACH));
});
