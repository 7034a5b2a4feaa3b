package partners;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.BitSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Producers and a consumer at full speed, while a test kills the broker. Each queue has one sending thread, which sends
 * numbered messages one after another and never repeats a number. So a queue must contain each number at most once and
 * in rising order, and every acknowledged number at the acknowledged offset.
 */
final class Flood {
    private static final int WRONG_SHOWN = 10;

    private final Map<String, Run> runs = new ConcurrentHashMap<>();

    void addTo(Map<String, Driver.Operation> operations) {
        operations.put("flood.start", args -> {
            Run run = new Run(args);
            run.start();
            runs.put(args.text("name"), run);
            return null;
        });
        operations.put("flood.progress", args -> runs.get(args.text("name")).progress());
        operations.put("flood.acknowledged", args -> runs.get(args.text("name")).acknowledged());
        operations.put("flood.stop", args -> runs.get(args.text("name")).stop(args.large("wait", 60_000)));
        operations.put("flood.verify", args -> runs.get(args.text("name")).verify());
        operations.put("flood.close", args -> {
            runs.remove(args.text("name")).close();
            return null;
        });
    }

    /** The numbers sent to one queue, with the acknowledged offsets and the delivered numbers. */
    private static final class SendStream {
        final MessageQueue queue;
        final BitSet delivered = new BitSet();
        long[] acknowledged = new long[1 << 16];
        int next;
        int lastNew = -1;
        int outOfOrder;
        int again;

        SendStream(MessageQueue queue) {
            this.queue = queue;
            Arrays.fill(acknowledged, -1);
        }

        synchronized void acknowledge(int number, long offset) {
            if (number >= acknowledged.length) {
                int old = acknowledged.length;
                acknowledged = Arrays.copyOf(acknowledged, old * 2);
                Arrays.fill(acknowledged, old, old * 2, -1);
            }
            acknowledged[number] = offset;
        }

        synchronized List<List<Long>> shown() {
            List<List<Long>> rows = new ArrayList<>();
            for (int number = 0; number < acknowledged.length; number++) {
                if (acknowledged[number] >= 0) {
                    rows.add(List.of((long) queue.getQueueId(), (long) number, acknowledged[number]));
                }
            }
            return rows;
        }

        /** A number may be delivered again after a kill; its first delivery must follow those of all smaller ones. */
        synchronized void deliver(int number) {
            if (delivered.get(number)) {
                again++;
                return;
            }
            delivered.set(number);
            if (number < lastNew) {
                outOfOrder++;
            }
            lastNew = number;
        }

        synchronized int undelivered() {
            int missing = 0;
            for (int number = 0; number < next && number < acknowledged.length; number++) {
                if (acknowledged[number] >= 0 && !delivered.get(number)) {
                    missing++;
                }
            }
            return missing;
        }
    }

    private static final class Run {
        private final String topic;
        private final String namesrv;
        private final String name;
        private final byte[] padding;
        private final boolean keys;
        private final DefaultMQProducer producer;
        private final DefaultMQPushConsumer consumer;
        private final Map<MessageQueue, SendStream> sendStreams = new LinkedHashMap<>();
        private final ExecutorService threads = Executors.newCachedThreadPool();
        private final List<Future<?>> senders = new ArrayList<>();
        private final AtomicLong accepted = new AtomicLong();
        private final AtomicLong refused = new AtomicLong();
        private final AtomicLong consumed = new AtomicLong();
        private volatile boolean running = true;
        private final Map<String, AtomicLong> refusals = new ConcurrentHashMap<>();
        private volatile String lastRefusal = "";

        Run(Args args) throws Exception {
            name = args.text("name");
            topic = args.text("topic");
            namesrv = args.text("namesrv");
            padding = "x".repeat(args.number("size", 200)).getBytes(StandardCharsets.UTF_8);
            keys = args.flag("keys");
            producer = new DefaultMQProducer(name + "_producer");
            producer.setNamesrvAddr(namesrv);
            producer.setInstanceName(name + "_producer");
            producer.setRetryTimesWhenSendFailed(0);
            producer.setSendMsgTimeout(args.number("timeout", 5_000));
            producer.setPollNameServerInterval(args.number("poll", 30_000));
            producer.start();
            consumer = new DefaultMQPushConsumer(name + "_consumer");
            consumer.setNamesrvAddr(namesrv);
            consumer.setInstanceName(name + "_consumer");
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setPersistConsumerOffsetInterval(1_000);
            consumer.setPollNameServerInterval(args.number("poll", 30_000));
            consumer.setPullTimeDelayMillsWhenException(500);
            consumer.setConsumeMessageBatchMaxSize(32);
            consumer.setConsumeThreadMin(4);
            consumer.setConsumeThreadMax(4);
            consumer.subscribe(topic, "*");
            consumer.registerMessageListener((MessageListenerOrderly) (batch, context) -> {
                for (MessageExt message : batch) {
                    MessageQueue from =
                        new MessageQueue(message.getTopic(), message.getBrokerName(), message.getQueueId());
                    sendStreams.get(from).deliver(number(message));
                }
                consumed.addAndGet(batch.size());
                return ConsumeOrderlyStatus.SUCCESS;
            });
            for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) {
                sendStreams.put(queue, new SendStream(queue));
            }
        }

        private static int number(MessageExt message) {
            byte[] body = message.getBody();
            int number = 0;
            for (int i = 0; i < body.length && body[i] != ' '; i++) {
                number = number * 10 + (body[i] - '0');
            }
            return number;
        }

        private byte[] body(int number) {
            byte[] head = (number + " ").getBytes(StandardCharsets.US_ASCII);
            byte[] body = Arrays.copyOf(head, head.length + padding.length);
            System.arraycopy(padding, 0, body, head.length, padding.length);
            return body;
        }

        void start() throws Exception {
            consumer.start();
            for (SendStream stream : sendStreams.values()) {
                senders.add(threads.submit(() -> send(stream)));
            }
        }

        private void send(SendStream stream) {
            while (running) {
                int number = stream.next++;
                Message message = new Message(topic, body(number));
                if (keys) {
                    message.setKeys("k" + stream.queue.getQueueId() + "_" + number);
                }
                try {
                    SendResult result = producer.send(message, stream.queue);
                    if (result.getSendStatus() == SendStatus.SEND_OK) {
                        stream.acknowledge(number, result.getQueueOffset());
                        accepted.incrementAndGet();
                        continue;
                    }
                    count(result.getSendStatus().name(), result.getSendStatus().name());
                } catch (MQBrokerException failure) {
                    count(String.valueOf(failure.getResponseCode()), failure.getMessage());
                } catch (Exception failure) {
                    count(failure.getClass().getSimpleName(), String.valueOf(failure.getMessage()));
                }
                pause();
            }
        }

        /** What became of a send that was not acknowledged: a status, the code of an error, or an exception. */
        private void count(String kind, String text) {
            lastRefusal = text;
            refusals.computeIfAbsent(kind, unseen -> new AtomicLong()).incrementAndGet();
            refused.incrementAndGet();
        }

        /** Sends to a stopped broker fail immediately; without a pause the retries would slow down its start. */
        private static void pause() {
            try {
                TimeUnit.MILLISECONDS.sleep(100);
            } catch (InterruptedException stop) {
                Thread.currentThread().interrupt();
            }
        }

        Map<String, Object> progress() {
            Map<String, Object> shown = new LinkedHashMap<>();
            shown.put("accepted", accepted.get());
            shown.put("refused", refused.get());
            shown.put("consumed", consumed.get());
            Map<String, Long> kinds = new LinkedHashMap<>();
            refusals.forEach((kind, times) -> kinds.put(kind, times.get()));
            shown.put("refusals", kinds);
            shown.put("lastRefusal", lastRefusal);
            return shown;
        }

        /** What was acknowledged with SEND_OK: queue, number and offset of each message. */
        List<List<Long>> acknowledged() {
            List<List<Long>> shown = new ArrayList<>();
            for (SendStream stream : sendStreams.values()) {
                shown.addAll(stream.shown());
            }
            return shown;
        }

        /** Ends the producers and waits until the consumer has received all acknowledged messages. */
        Map<String, Object> stop(long wait) throws Exception {
            running = false;
            for (Future<?> sender : senders) {
                sender.get();
            }
            long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(wait);
            int missing = undelivered();
            while (missing > 0 && System.nanoTime() < deadline) {
                TimeUnit.MILLISECONDS.sleep(200);
                missing = undelivered();
            }
            Map<String, Object> shown = progress();
            shown.put("undelivered", missing);
            shown.put("outOfOrder", sendStreams.values().stream().mapToInt(stream -> stream.outOfOrder).sum());
            shown.put("again", sendStreams.values().stream().mapToInt(stream -> stream.again).sum());
            return shown;
        }

        private int undelivered() {
            return sendStreams.values().stream().mapToInt(SendStream::undelivered).sum();
        }

        /** Reads every queue from the start and compares it with the acknowledged numbers and offsets. */
        Map<String, Object> verify() throws Exception {
            DefaultMQPullConsumer reader = new DefaultMQPullConsumer(name + "_reader");
            reader.setNamesrvAddr(namesrv);
            reader.setInstanceName(name + "_reader");
            reader.start();
            List<String> wrong = new ArrayList<>();
            long stored = 0;
            try {
                for (SendStream stream : sendStreams.values()) {
                    stored += verify(reader, stream, wrong);
                }
            } finally {
                reader.shutdown();
            }
            Map<String, Object> shown = new LinkedHashMap<>();
            shown.put("stored", stored);
            shown.put("acknowledged", accepted.get());
            shown.put("wrong", wrong.size());
            shown.put("examples", wrong.subList(0, Math.min(wrong.size(), WRONG_SHOWN)));
            return shown;
        }

        private long verify(DefaultMQPullConsumer reader, SendStream stream, List<String> wrong) throws Exception {
            long end = reader.maxOffset(stream.queue);
            long offset = reader.minOffset(stream.queue);
            int last = -1;
            BitSet right = new BitSet();
            BitSet found = new BitSet();
            if (offset != 0) {
                wrong.add(stream.queue + " starts at " + offset);
            }
            while (offset < end) {
                PullResult pulled = reader.pull(stream.queue, "*", offset, 32);
                if (pulled.getPullStatus() != PullStatus.FOUND) {
                    wrong.add(stream.queue + " at " + offset + " of " + end + ": " + pulled.getPullStatus());
                    break;
                }
                for (MessageExt message : pulled.getMsgFoundList()) {
                    int number = number(message);
                    if (message.getQueueOffset() != offset) {
                        wrong.add(stream.queue + " has offset " + message.getQueueOffset() + " instead of " + offset);
                    }
                    if (number <= last) {
                        wrong.add(stream.queue + " at " + offset + ": " + number + " after " + last);
                    }
                    if (!Arrays.equals(message.getBody(), body(number))) {
                        wrong.add(stream.queue + " at " + offset + ": not the body that was sent");
                    }
                    if (number < stream.acknowledged.length && stream.acknowledged[number] == offset) {
                        right.set(number);
                    }
                    found.set(number);
                    last = number;
                    offset++;
                }
            }
            for (int number = 0; number < stream.next && number < stream.acknowledged.length; number++) {
                if (stream.acknowledged[number] >= 0 && !right.get(number)) {
                    wrong.add(stream.queue + ": " + number + " was acknowledged at " + stream.acknowledged[number]
                        + " and is missing");
                }
                if (stream.delivered.get(number) && !found.get(number)) {
                    wrong.add(stream.queue + ": " + number + " was delivered and is missing");
                }
            }
            return end;
        }

        void close() {
            running = false;
            consumer.shutdown();
            producer.shutdown();
            threads.shutdownNow();
        }
    }
}
