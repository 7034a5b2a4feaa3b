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
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Producers and a consumer at full speed, while a test kills the broker under them. Each queue has one thread that
 * sends numbered messages one after another and never repeats a number, so a queue must hold its numbers in rising
 * order, each once, and every acknowledged number at the very offset that was acknowledged.
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
        operations.put("flood.stop", args -> runs.get(args.text("name")).stop(args.large("wait", 60_000)));
        operations.put("flood.verify", args -> runs.get(args.text("name")).verify());
        operations.put("flood.close", args -> {
            runs.remove(args.text("name")).close();
            return null;
        });
    }

    /** The numbers sent to one queue, and what came back. */
    private static final class Lane {
        final MessageQueue queue;
        final BitSet delivered = new BitSet();
        long[] acknowledged = new long[1 << 16];
        int next;
        int lastNew = -1;
        int outOfOrder;
        int again;

        Lane(MessageQueue queue) {
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

        /** A number may come again after a kill; the first time it comes, it comes after all smaller ones. */
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
        private final Map<MessageQueue, Lane> lanes = new LinkedHashMap<>();
        private final ExecutorService threads = Executors.newCachedThreadPool();
        private final List<Future<?>> senders = new ArrayList<>();
        private final AtomicLong accepted = new AtomicLong();
        private final AtomicLong refused = new AtomicLong();
        private final AtomicLong consumed = new AtomicLong();
        private volatile boolean running = true;
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
            producer.start();
            consumer = new DefaultMQPushConsumer(name + "_consumer");
            consumer.setNamesrvAddr(namesrv);
            consumer.setInstanceName(name + "_consumer");
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setPersistConsumerOffsetInterval(1_000);
            consumer.setPullTimeDelayMillsWhenException(500);
            consumer.setConsumeMessageBatchMaxSize(32);
            consumer.setConsumeThreadMin(4);
            consumer.setConsumeThreadMax(4);
            consumer.subscribe(topic, "*");
            consumer.registerMessageListener((MessageListenerOrderly) (batch, context) -> {
                for (MessageExt message : batch) {
                    MessageQueue from =
                        new MessageQueue(message.getTopic(), message.getBrokerName(), message.getQueueId());
                    lanes.get(from).deliver(number(message));
                }
                consumed.addAndGet(batch.size());
                return ConsumeOrderlyStatus.SUCCESS;
            });
            for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) {
                lanes.put(queue, new Lane(queue));
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
            for (Lane lane : lanes.values()) {
                senders.add(threads.submit(() -> send(lane)));
            }
        }

        private void send(Lane lane) {
            while (running) {
                int number = lane.next++;
                Message message = new Message(topic, body(number));
                if (keys) {
                    message.setKeys("k" + lane.queue.getQueueId() + "_" + number);
                }
                try {
                    SendResult result = producer.send(message, lane.queue);
                    if (result.getSendStatus() == SendStatus.SEND_OK) {
                        lane.acknowledge(number, result.getQueueOffset());
                        accepted.incrementAndGet();
                        continue;
                    }
                    lastRefusal = result.getSendStatus().name();
                } catch (Exception failure) {
                    lastRefusal = String.valueOf(failure.getMessage());
                }
                refused.incrementAndGet();
                pause();
            }
        }

        /** A broker that is down refuses at once; asking without a break would starve it of the processor. */
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
            shown.put("lastRefusal", lastRefusal);
            return shown;
        }

        /** Ends the producers and waits until the consumer has had everything that was acknowledged. */
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
            shown.put("outOfOrder", lanes.values().stream().mapToInt(lane -> lane.outOfOrder).sum());
            shown.put("again", lanes.values().stream().mapToInt(lane -> lane.again).sum());
            return shown;
        }

        private int undelivered() {
            return lanes.values().stream().mapToInt(Lane::undelivered).sum();
        }

        /** Reads every queue from its beginning and compares it with what was acknowledged. */
        Map<String, Object> verify() throws Exception {
            DefaultMQPullConsumer reader = new DefaultMQPullConsumer(name + "_reader");
            reader.setNamesrvAddr(namesrv);
            reader.setInstanceName(name + "_reader");
            reader.start();
            List<String> wrong = new ArrayList<>();
            long stored = 0;
            try {
                for (Lane lane : lanes.values()) {
                    stored += verify(reader, lane, wrong);
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

        private long verify(DefaultMQPullConsumer reader, Lane lane, List<String> wrong) throws Exception {
            long end = reader.maxOffset(lane.queue);
            long offset = reader.minOffset(lane.queue);
            int last = -1;
            BitSet right = new BitSet();
            if (offset != 0) {
                wrong.add(lane.queue + " starts at " + offset);
            }
            while (offset < end) {
                PullResult pulled = reader.pull(lane.queue, "*", offset, 32);
                if (pulled.getPullStatus() != PullStatus.FOUND) {
                    wrong.add(lane.queue + " at " + offset + " of " + end + ": " + pulled.getPullStatus());
                    break;
                }
                for (MessageExt message : pulled.getMsgFoundList()) {
                    int number = number(message);
                    if (message.getQueueOffset() != offset) {
                        wrong.add(lane.queue + " has offset " + message.getQueueOffset() + " where " + offset + " is due");
                    }
                    if (number <= last) {
                        wrong.add(lane.queue + " at " + offset + ": " + number + " after " + last);
                    }
                    if (!Arrays.equals(message.getBody(), body(number))) {
                        wrong.add(lane.queue + " at " + offset + ": not the body that was sent");
                    }
                    if (number < lane.acknowledged.length && lane.acknowledged[number] == offset) {
                        right.set(number);
                    }
                    last = number;
                    offset++;
                }
            }
            for (int number = 0; number < lane.next && number < lane.acknowledged.length; number++) {
                if (lane.acknowledged[number] >= 0 && !right.get(number)) {
                    wrong.add(lane.queue + ": " + number + " was acknowledged at " + lane.acknowledged[number]
                        + " and is not there");
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
