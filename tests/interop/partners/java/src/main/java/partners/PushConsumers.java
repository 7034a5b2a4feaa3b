package partners;

import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.consumer.store.ReadOffsetType;
import org.apache.rocketmq.client.impl.consumer.DefaultMQPushConsumerImpl;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/** Push consumers by name: each stores the received messages until the test requests them. */
final class PushConsumers {
    private final Map<String, Receiver> consumers = new ConcurrentHashMap<>();

    void addTo(Map<String, Driver.Operation> operations) {
        operations.put("consumer.open", this::open);
        operations.put("consumer.received", args -> named(args)
            .received(args.number("count", 0), args.large("wait", 0), args.text("distinct", null)));
        operations.put("consumer.failures", args -> named(args).failures());
        operations.put("consumer.queues", args -> Messages.showQueues(
            new ArrayList<>(named(args).consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl()
                .getProcessQueueTable().keySet())));
        operations.put("consumer.position", args -> named(args).position(args.text("topic")));
        operations.put("consumer.close", args -> {
            Receiver receiver = named(args);
            consumers.remove(args.text("name"));
            receiver.close();
            return null;
        });
    }

    private Receiver named(Args args) {
        Receiver receiver = consumers.get(args.text("name"));
        if (receiver == null) {
            throw new IllegalArgumentException("no consumer is open under the name " + args.text("name"));
        }
        return receiver;
    }

    private Object open(Args args) throws Exception {
        Receiver receiver = new Receiver(args);
        receiver.consumer.start();
        consumers.put(args.text("name"), receiver);
        return receiver.consumer.buildMQClientId();
    }

    /** MessageModel lives in different packages in the 4.x and 5.x clients; the setter knows which. */
    private static void setModel(DefaultMQPushConsumer consumer, String model) throws Exception {
        for (Method method : DefaultMQPushConsumer.class.getMethods()) {
            if (method.getName().equals("setMessageModel")) {
                for (Object constant : method.getParameterTypes()[0].getEnumConstants()) {
                    if (((Enum<?>) constant).name().equals(model)) {
                        method.invoke(consumer, constant);
                        return;
                    }
                }
            }
        }
        throw new IllegalArgumentException("no message model " + model);
    }

    private static final class Receiver {
        final DefaultMQPushConsumer consumer;
        private final List<Map<String, Object>> messages = new ArrayList<>();
        private final List<Map<String, Object>> failures = new ArrayList<>();
        private final int failUntil;
        private final boolean reply;
        private DefaultMQProducer replies;

        Receiver(Args args) throws Exception {
            consumer = new DefaultMQPushConsumer(args.text("group"), Security.hook(args),
                new AllocateMessageQueueAveragely(), args.flag("trace"), null);
            Security.secure(consumer, args);
            consumer.setNamesrvAddr(args.text("namesrv"));
            consumer.setInstanceName(args.text("instance", args.text("name")));
            consumer.setPollNameServerInterval(args.number("poll", 1_000));
            consumer.setPersistConsumerOffsetInterval(args.number("persist", 1_000));
            consumer.setHeartbeatBrokerInterval(args.number("heartbeat", 30_000));
            consumer.setVipChannelEnabled(args.flag("vip"));
            consumer.setConsumeFromWhere(ConsumeFromWhere.valueOf(args.text("from", "CONSUME_FROM_FIRST_OFFSET")));
            if (args.has("timestamp")) {
                consumer.setConsumeTimestamp(args.text("timestamp"));
            }
            consumer.setMaxReconsumeTimes(args.number("maxReconsume", -1));
            consumer.setConsumeThreadMin(args.number("threads", 4));
            consumer.setConsumeThreadMax(args.number("threads", 4));
            consumer.setConsumeMessageBatchMaxSize(args.number("batch", 1));
            consumer.setSuspendCurrentQueueTimeMillis(args.large("suspend", 500));
            if (args.flag("brokerRebalance")) {
                Optional.call(consumer, "setClientRebalance", boolean.class, false);
            }
            setModel(consumer, args.text("model", "CLUSTERING"));
            for (Map.Entry<String, String> one : args.texts("subscribe").entrySet()) {
                consumer.subscribe(one.getKey(), one.getValue());
            }
            for (Map.Entry<String, String> one : args.texts("sql").entrySet()) {
                consumer.subscribe(one.getKey(), MessageSelector.bySql(one.getValue()));
            }
            failUntil = args.number("failUntil", 0);
            reply = args.flag("reply");
            if (reply) {
                replies = new DefaultMQProducer(args.text("group") + "_replies", Security.hook(args));
                Security.secure(replies, args);
                replies.setNamesrvAddr(args.text("namesrv"));
                replies.setInstanceName(args.text("name") + "_replies");
                replies.start();
            }
            if (args.flag("orderly")) {
                consumer.registerMessageListener((MessageListenerOrderly) (batch, context) ->
                    take(batch) ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
            } else {
                consumer.registerMessageListener((MessageListenerConcurrently) (batch, context) ->
                    take(batch) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
            }
        }

        /** Stores a batch; false if the test wants it to fail (until it has been tried failUntil times). */
        private boolean take(List<MessageExt> batch) {
            boolean good = true;
            for (MessageExt message : batch) {
                Map<String, Object> shown = Messages.show(message);
                good &= message.getReconsumeTimes() >= failUntil;
                synchronized (messages) {
                    messages.add(shown);
                    messages.notifyAll();
                }
                if (reply) {
                    answer(message);
                }
            }
            return good;
        }

        private void answer(MessageExt message) {
            try {
                String text = "reply to " + new String(message.getBody(), StandardCharsets.UTF_8);
                replies.send(MessageUtil.createReplyMessage(message, text.getBytes(StandardCharsets.UTF_8)), 5_000);
            } catch (Exception failure) {
                synchronized (messages) {
                    failures.add(Driver.describe(failure));
                    messages.notifyAll();
                }
            }
        }

        /** Waits for enough messages (with different values of a field, if one is named); returns all received. */
        List<Map<String, Object>> received(int count, long wait, String distinct) throws InterruptedException {
            long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(wait);
            synchronized (messages) {
                while (count(distinct) < count) {
                    long left = TimeUnit.NANOSECONDS.toMillis(deadline - System.nanoTime());
                    if (left <= 0) {
                        break;
                    }
                    messages.wait(left);
                }
                return new ArrayList<>(messages);
            }
        }

        private int count(String distinct) {
            if (distinct == null) {
                return messages.size();
            }
            Set<Object> values = new HashSet<>();
            messages.forEach(message -> values.add(message.get(distinct)));
            return values.size();
        }

        /** The sum of the offsets that this client will commit, those behind the processed messages. */
        long position(String topic) {
            DefaultMQPushConsumerImpl running = consumer.getDefaultMQPushConsumerImpl();
            return running.getRebalanceImpl().getProcessQueueTable().keySet().stream()
                .filter(queue -> queue.getTopic().equals(topic))
                .mapToLong(queue -> running.getOffsetStore().readOffset(queue, ReadOffsetType.READ_FROM_MEMORY))
                .filter(offset -> offset > 0)
                .sum();
        }

        List<Map<String, Object>> failures() {
            synchronized (messages) {
                return new ArrayList<>(failures);
            }
        }

        void close() {
            consumer.shutdown();
            if (replies != null) {
                replies.shutdown();
            }
        }
    }
}
