// A client of rhea that speaks to the coordinator frame by frame, since rhea itself knows no transactions.
// node transact.js HOST PORT QUEUE: prints one line of JSON, what became of each step.
'use strict';

const rhea = require('rhea');
const { types, message } = rhea;

const [host, port, queue] = process.argv.slice(2);
const DECLARED = 0x33;
const OUTCOMES = ['amqp:accepted:list', 'amqp:rejected:list', 'amqp:released:list', 'amqp:modified:list'];

const request = (code, ...fields) => {
    const list = Buffer.concat(fields);
    const head = fields.length ? [0xc0, list.length + 1, fields.length] : [0x45];
    return Buffer.concat([Buffer.from([0x00, 0x53, 0x77, 0x00, 0x53, code, ...head]), list]);
};
const declare = () => request(0x31);
const binary = (octets) => Buffer.concat([Buffer.from([0xa0, octets.length]), octets]);
const discharge = (txn, fail) => request(0x32, binary(txn), Buffer.from([fail ? 0x41 : 0x42]));
const inTransaction = (txn, outcome) =>
    types.described(types.wrap_ulong(0x34), types.wrap_list(outcome ? [types.wrap_binary(txn), outcome] : [types.wrap_binary(txn)]));

const STATE = 7; // of the fields of transfer; rhea has a name for it, but cannot write what it holds
const setState = (transfer, state) => {
    while (transfer.value.length < STATE) transfer.value.push(types.wrap(null));
    transfer.value[STATE] = state;
};

class Client {
    constructor(connection) {
        this.states = new Map();
        this.waiting = new Map();
        this.control = connection.attach_sender({ source: { outcomes: OUTCOMES } });
        this.control.local.attach.target = types.described(
            types.wrap_ulong(0x30), types.wrap_list([types.wrap_symbol('amqp:local-transactions')]));
        this.sender = connection.attach_sender({ target: queue });
        this.receiver = connection.attach_receiver({ source: queue, credit_window: 0, autoaccept: false });
        const session = this.sender.session;
        const output = session.output.bind(session);
        session.output = (frame, payload) => {
            const isTransfer = frame.delivery_tag !== undefined;
            if (isTransfer && this.states.has(frame.delivery_id)) setState(frame, this.states.get(frame.delivery_id));
            output(frame, payload);
        };
        for (const link of [this.control, this.sender]) {
            link.on('settled', (context) => {
                const { id, remote_state } = context.delivery;
                const resolve = this.waiting.get(id);
                if (resolve) resolve(remote_state);
            });
        }
    }

    ready(link) {
        return link.credit > 0 ? Promise.resolve() : new Promise((resolve) => link.once('sendable', resolve));
    }

    send(link, payload, state) {
        const delivery = link.send(payload, undefined, 0);
        if (state) this.states.set(delivery.id, state);
        return new Promise((resolve) => this.waiting.set(delivery.id, resolve));
    }

    async declare() {
        const outcome = await this.send(this.control, declare());
        if (Number(outcome.descriptor.value) !== DECLARED) throw new Error(`not declared: ${outcome}`);
        return types.unwrap(outcome.value[0]);
    }

    async discharge(txn, fail) {
        return name(await this.send(this.control, discharge(txn, fail)));
    }

    async post(txn, body) {
        const outcome = await this.send(this.sender, message.encode({ durable: true, body }), inTransaction(txn));
        return Number(outcome.descriptor.value) === 0x34 ? 'in the transaction' : name(outcome);
    }

    take(count) {
        return new Promise((resolve) => {
            const found = [];
            this.receiver.on('message', (context) => {
                found.push(context);
                if (found.length === count) {
                    this.receiver.removeAllListeners('message');
                    resolve(found);
                }
            });
            this.receiver.add_credit(count);
        });
    }
}

const name = (outcome) => {
    const kind = outcome.constructor.composite_type || String(outcome.descriptor.value);
    return outcome.error ? `${kind}: ${outcome.error.condition}` : kind;
};

// rhea writes transfers before dispositions: one of them must be written before the discharge is thought of.
const retire = (context, settled, txn) => {
    context.delivery.update(settled, inTransaction(txn, message.accepted().described()));
    return new Promise(setImmediate);
};

async function steps(client) {
    const said = {};
    await Promise.all([client.ready(client.control), client.ready(client.sender)]);
    let txn = await client.declare();
    said.posted = [await client.post(txn, 'kept 1'), await client.post(txn, 'kept 2')];
    said.committed = await client.discharge(txn, false);
    txn = await client.declare();
    await client.post(txn, 'dropped');
    said.failed = await client.discharge(txn, true);
    const [first, second] = await client.take(2);
    said.bodies = [first.message.body, second.message.body];
    txn = await client.declare();
    await retire(first, false, txn);
    said.consumed = await client.discharge(txn, false);
    txn = await client.declare();
    await retire(second, true, txn);
    said.returned = await client.discharge(txn, true);
    said.unknown = await client.discharge(txn, false);
    return said;
}

const connection = rhea.connect({ host, port: Number(port), username: 'guest', password: 'guest', reconnect: false });
connection.on('connection_error', (context) => { console.error(context.connection.error); process.exit(1); });
connection.on('disconnected', (context) => { console.error(context.error); process.exit(1); });
connection.once('connection_open', () => {
    steps(new Client(connection)).then((said) => {
        console.log(JSON.stringify(said));
        connection.removeAllListeners('disconnected');
        connection.close();
    }).catch((error) => { console.error(error); process.exit(1); });
});
