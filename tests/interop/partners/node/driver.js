'use strict';

// Drives the Node client for the tests, in the same way as the Java driver: one JSON request a line on standard input,
// one JSON answer a line on standard output. What the client itself prints goes to standard error.

const readline = require('readline');
const { Consumer, Message, Producer } = require('ali-ons');

const log = (...words) => console.error(...words);
const logger = { debug() {}, info: log, warn: log, error: log };
// The client wants an HTTP client for looking up name servers; with a fixed name server it is never called.
const httpclient = { request: async () => { throw new Error('no HTTP look-up in these tests'); } };
const clients = new Map();

function options(request) {
  return {
    httpclient,
    logger,
    accessKeyId: request.accessKey || 'test',
    accessKeySecret: request.secretKey || 'test',
    nameSrv: request.namesrv,
    clientIP: '127.0.0.1',
    instanceName: request.name,
    pollNameServerInteval: 1000,
    persistConsumerOffsetInterval: 1000,
    rebalanceInterval: 1000,
  };
}

function show(message) {
  return {
    topic: message.topic,
    queue: message.queueId,
    offset: Number(message.queueOffset),
    body: message.body.toString(),
    tags: message.tags,
    keys: message.keys,
    msgId: message.msgId,
    properties: { ...message.properties },
    born: Number(message.bornTimestamp),
    stored: Number(message.storeTimestamp),
    reconsume: message.reconsumeTimes,
  };
}

async function until(condition, wait) {
  const deadline = Date.now() + wait;
  while (!condition() && Date.now() < deadline) {
    await new Promise(resolve => setTimeout(resolve, 20));
  }
}

const operations = {
  async 'producer.open'(request) {
    const producer = new Producer({ ...options(request), producerGroup: request.group });
    producer.on('error', error => logger.error(error));
    await producer.ready();
    clients.set(request.name, producer);
  },

  async 'producer.send'(request) {
    const results = [];
    for (const spec of request.messages) {
      const message = new Message(request.topic, spec.tags || '', spec.body);
      if (spec.keys) {
        message.keys = spec.keys.split(' ');
      }
      if (spec.delay) {
        message.delayTimeLevel = spec.delay;
      }
      if (spec.deliver) {
        message.setStartDeliverTime(spec.deliver);
      }
      Object.assign(message.properties, spec.properties || {});
      const sent = await clients.get(request.name).send(message);
      results.push({
        status: sent.sendStatus,
        msgId: sent.msgId,
        queue: Number(sent.messageQueue.queueId),
        offset: Number(sent.queueOffset),
        offsetMsgId: sent.offsetMsgId,
      });
    }
    return results;
  },

  async 'consumer.open'(request) {
    const consumer = new Consumer({
      ...options(request),
      consumerGroup: request.group,
      isBroadcast: request.model === 'BROADCASTING',
      consumeFromWhere: 'CONSUME_FROM_FIRST_OFFSET',
    });
    consumer.on('error', error => logger.error(error));
    consumer.seen = [];
    const sql = Object.entries(request.sql || {})
      .map(([ topic, subString ]) => [ topic, { expressionType: 'SQL92', subString } ]);
    for (const [topic, expression] of [ ...Object.entries(request.subscribe || {}), ...sql ]) {
      consumer.subscribe(topic, expression, async message => {
        consumer.seen.push(show(message));
        return message.reconsumeTimes < (request.failUntil || 0) ? Consumer.ACTION_RETRY : undefined;
      });
    }
    await consumer.ready();
    clients.set(request.name, consumer);
  },

  async 'consumer.received'(request) {
    const { seen } = clients.get(request.name);
    await until(() => seen.length >= request.count, request.wait || 0);
    return seen;
  },

  async close(request) {
    const client = clients.get(request.name);
    clients.delete(request.name);
    await client.close();
  },
};

function answer(reply) {
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}

process.on('unhandledRejection', error => logger.error(error));
answer({ id: 0, result: { client: require('ali-ons/package.json').version, node: process.version } });
readline.createInterface({ input: process.stdin }).on('line', async line => {
  const request = JSON.parse(line);
  try {
    answer({ id: request.id, result: (await operations[request.op](request)) ?? null });
  } catch (error) {
    logger.error(error);
    answer({ id: request.id, error: { type: error.name, message: error.message, codes: [ error.code ] } });
  }
}).on('close', () => process.exit(0));
