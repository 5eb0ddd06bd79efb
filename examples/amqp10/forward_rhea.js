// Moves messages from one queue to another with rhea, without a transaction: no message is lost, some may be repeated.
// node forward_rhea.js HOST PORT USER PASSWORD SOURCE TARGET COUNT
'use strict';

const rhea = require('rhea');

const [host, port, username, password, source, target, count] = process.argv.slice(2);
const fail = (reason) => {
    console.error(reason);
    process.exit(1);
};

const connection = rhea.connect({ host, port: Number(port), username, password, reconnect: false });
const sender = connection.open_sender(target);
const receiver = connection.open_receiver({ source, credit_window: 0, autoaccept: false });
const received = new Map(); // the received delivery of each sent message
let left = Number(count);

sender.once('sendable', () => receiver.add_credit(1));

receiver.on('message', (context) => {
    const sent = sender.send({ body: context.message.body, durable: true });
    received.set(sent.id, context.delivery);
});

sender.on('accepted', (context) => { // the message is durable in the target queue
    received.get(context.delivery.id).accept();
    received.delete(context.delivery.id);
    left -= 1;
    if (left) receiver.add_credit(1);
    else connection.close();
});

sender.on('released', () => fail(`no queue takes the messages for ${target}`));
sender.on('rejected', (context) => fail(context.delivery.remote_state.error.description));
sender.on('sender_error', () => fail(`${sender.error.condition}: ${sender.error.description}`));
receiver.on('receiver_error', () => fail(`${receiver.error.condition}: ${receiver.error.description}`));
connection.on('connection_error', () => fail(connection.error.description));
connection.on('disconnected', (context) => left && fail(context.error || 'the connection is lost'));
