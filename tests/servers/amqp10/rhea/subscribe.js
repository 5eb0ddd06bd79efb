// A client of rhea that subscribes to an exchange, and lets messages fail.
// node subscribe.js HOST PORT EXCHANGE: prints one line of JSON, what became of each step.
'use strict';

const rhea = require('rhea');
const { filter, types } = rhea;

const [host, port, exchange] = process.argv.slice(2);
const TOPIC = 'apache.org:legacy-amqp-topic-binding:string';

const once = (emitter, event) => new Promise((resolve) => emitter.once(event, resolve));
const named = (source) => Object.keys(source.filter || {});

async function steps(connection) {
    const said = {};
    const wanted = filter.selector("colour = 'green'");
    wanted.pattern = types.wrap_described('*.order', TOPIC);
    const receiver = connection.attach_receiver({
        source: { address: `/exchanges/${exchange}`, filter: wanted }, credit_window: 0, autoaccept: false });
    await once(receiver, 'receiver_open');
    said.filters = named(receiver.source);

    const sender = connection.attach_sender({ target: `/exchanges/${exchange}` });
    await once(sender, 'sendable');
    sender.send({ subject: 'new.bill', body: 'no' });
    sender.send({ subject: 'new.order', body: 'yes' });

    const take = () => {
        receiver.add_credit(1);
        return once(receiver, 'message');
    };
    const first = await take();
    said.first = [first.message.body, first.message.first_acquirer === true, first.message.delivery_count || 0];
    first.delivery.modified({ delivery_failed: true, message_annotations: { 'x-opt-why': 'late' } });
    const second = await take();
    const { body, first_acquirer, delivery_count, message_annotations } = second.message;
    said.second = [body, first_acquirer === true, delivery_count || 0, message_annotations['x-opt-why'] || null];
    second.delivery.accept();

    const durable = connection.attach_receiver({
        source: { address: `/exchanges/${exchange}`, durable: 2, expiry_policy: 'never' } });
    await once(durable, 'receiver_error');
    said.durable = durable.error.condition;
    return said;
}

const connection = rhea.connect({ host, port: Number(port), username: 'guest', password: 'guest', reconnect: false });
connection.on('connection_error', (context) => { console.error(context.connection.error); process.exit(1); });
connection.on('disconnected', (context) => { console.error(context.error); process.exit(1); });
connection.once('connection_open', () => {
    steps(connection).then((said) => {
        console.log(JSON.stringify(said));
        connection.removeAllListeners('disconnected');
        connection.close();
    }).catch((error) => { console.error(error); process.exit(1); });
});
