package partners;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.MessageQueueSelector;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Producers by name: all kinds of sends, transactions, request and reply, and a producer's queries. */
final class Producers {
    /** Ordered sends go to the queue that their "order" argument picks, the same one every time. */
    private static final MessageQueueSelector BY_ORDER =
        (queues, message, order) -> queues.get((Integer) order % queues.size());

    private final Map<String, DefaultMQProducer> producers = new ConcurrentHashMap<>();
    private final Map<String, List<Map<String, Object>>> checks = new ConcurrentHashMap<>();
    private final Map<String, AtomicBoolean> undecided = new ConcurrentHashMap<>();

    void addTo(Map<String, Driver.Operation> operations) {
        operations.put("producer.open", this::open);
        operations.put("producer.close", this::close);
        operations.put("producer.send", this::send);
        operations.put("producer.transaction", this::transaction);
        operations.put("producer.checks", args -> new ArrayList<>(checks.get(args.text("name"))));
        operations.put("producer.decide", args -> {
            undecided.get(args.text("name")).set(false);
            return null;
        });
        operations.put("producer.request", this::request);
        operations.put("producer.recall", this::recall);
        operations.put("producer.queues", args ->
            Messages.showQueues(named(args).fetchPublishMessageQueues(args.text("topic"))));
        operations.put("producer.queryKey", this::queryKey);
        operations.put("producer.viewId", args ->
            Messages.show(named(args).viewMessage(args.text("topic"), args.text("msgId"))));
        operations.put("producer.viewUnique", this::viewUnique);
        operations.put("producer.offsets", this::offsets);
    }

    private DefaultMQProducer named(Args args) {
        DefaultMQProducer producer = producers.get(args.text("name"));
        if (producer == null) {
            throw new IllegalArgumentException("no producer is open under the name " + args.text("name"));
        }
        return producer;
    }

    private Object open(Args args) throws Exception {
        String name = args.text("name");
        DefaultMQProducer producer;
        if (args.flag("transactional")) {
            List<Map<String, Object>> checked = Collections.synchronizedList(new ArrayList<>());
            checks.put(name, checked);
            AtomicBoolean waits = new AtomicBoolean(args.flag("undecided"));
            undecided.put(name, waits);
            TransactionMQProducer transactional =
                new TransactionMQProducer(
                    null, args.text("group"), Security.hook(args), args.flag("trace"), null);
            transactional.setTransactionListener(new ByProperty(checked, waits));
            producer = transactional;
        } else {
            producer = new DefaultMQProducer(args.text("group"), Security.hook(args), args.flag("trace"), null);
        }
        Security.secure(producer, args);
        producer.setNamesrvAddr(args.text("namesrv"));
        producer.setInstanceName(args.text("instance", name));
        producer.setRetryTimesWhenSendFailed(args.number("retries", 2));
        producer.setRetryTimesWhenSendAsyncFailed(args.number("retries", 2));
        producer.setSendMsgTimeout(args.number("timeout", 10_000));
        producer.setVipChannelEnabled(args.flag("vip"));
        producer.setPollNameServerInterval(args.number("poll", 1_000));
        producer.setHeartbeatBrokerInterval(args.number("heartbeat", 30_000));
        producer.setMaxMessageSize(args.number("largest", 8 * 1024 * 1024));
        producer.setDefaultTopicQueueNums(args.number("queues", 4));
        if (args.has("compressOver")) {
            producer.setCompressMsgBodyOverHowmuch(args.number("compressOver", 4096));
        }
        if (args.flag("autoBatch")) {
            Optional.call(producer, "setAutoBatch", boolean.class, true);
        }
        producer.start();
        if (args.has("batchDelay")) {
            Optional.call(producer, "batchMaxDelayMs", int.class, args.number("batchDelay", 10));
        }
        producers.put(name, producer);
        return producer.buildMQClientId();
    }

    private Object close(Args args) {
        DefaultMQProducer producer = named(args);
        producers.remove(args.text("name"));
        producer.shutdown();
        return null;
    }

    private Object send(Args args) throws Exception {
        DefaultMQProducer producer = named(args);
        String topic = args.text("topic");
        List<Message> messages = new ArrayList<>();
        for (Args spec : args.objects("messages")) {
            messages.add(Messages.build(topic, spec));
        }
        MessageQueue fixed = args.has("broker") ? Messages.queue(args) : null;
        switch (args.text("mode", "sync")) {
            case "sync":
                return sendSync(producer, messages, fixed);
            case "async":
                return sendAsync(producer, messages, fixed);
            case "oneway":
                for (Message message : messages) {
                    if (fixed == null) {
                        producer.sendOneway(message);
                    } else {
                        producer.sendOneway(message, fixed);
                    }
                }
                return null;
            case "batch":
                return List.of(Messages.show(fixed == null ? producer.send(messages) : producer.send(messages, fixed)));
            case "ordered":
                return sendOrdered(producer, messages, args.objects("messages"));
            default:
                throw new IllegalArgumentException("no way to send: " + args.text("mode"));
        }
    }

    private static Object sendSync(DefaultMQProducer producer, List<Message> messages, MessageQueue fixed)
        throws Exception {
        List<Object> results = new ArrayList<>();
        for (Message message : messages) {
            results.add(Messages.show(fixed == null ? producer.send(message) : producer.send(message, fixed)));
        }
        return results;
    }

    private static Object sendOrdered(DefaultMQProducer producer, List<Message> messages, List<Args> specs)
        throws Exception {
        List<Object> results = new ArrayList<>();
        for (int i = 0; i < messages.size(); i++) {
            results.add(Messages.show(producer.send(messages.get(i), BY_ORDER, specs.get(i).number("order", 0))));
        }
        return results;
    }

    private static Object sendAsync(DefaultMQProducer producer, List<Message> messages, MessageQueue fixed)
        throws Exception {
        Object[] results = new Object[messages.size()];
        CountDownLatch pending = new CountDownLatch(results.length);
        for (int i = 0; i < results.length; i++) {
            int slot = i;
            SendCallback callback = new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    results[slot] = Messages.show(result);
                    pending.countDown();
                }

                @Override
                public void onException(Throwable failure) {
                    results[slot] = Map.of("failed", Driver.describe(failure));
                    pending.countDown();
                }
            };
            if (fixed == null) {
                producer.send(messages.get(i), callback);
            } else {
                producer.send(messages.get(i), fixed, callback);
            }
        }
        if (!pending.await(60, TimeUnit.SECONDS)) {
            throw new IllegalStateException(pending.getCount() + " callbacks were never called");
        }
        return results;
    }

    private Object transaction(Args args) throws Exception {
        TransactionMQProducer producer = (TransactionMQProducer) named(args);
        List<Object> results = new ArrayList<>();
        for (Args spec : args.objects("messages")) {
            Message message = Messages.build(args.text("topic"), spec);
            try {
                TransactionSendResult result = producer.sendMessageInTransaction(message, null);
                Map<String, Object> shown = Messages.show(result);
                shown.put("local", result.getLocalTransactionState().name());
                results.add(shown);
            } catch (Exception failure) {
                if (!args.flag("goOn")) {
                    throw failure;
                }
                results.add(Map.of("failed", Driver.describe(failure)));
            }
        }
        return results;
    }

    /** A request to any queue or to a given one; the reply comes as a return value or, if asked so, by a callback. */
    private Object request(Args args) throws Exception {
        DefaultMQProducer producer = named(args);
        Message message = Messages.build(args.text("topic"), args.objects("messages").get(0));
        MessageQueue fixed = args.has("broker") ? Messages.queue(args) : null;
        long wait = args.large("wait", 5_000);
        Message reply;
        if (!args.flag("callback")) {
            reply = fixed == null ? producer.request(message, wait) : producer.request(message, fixed, wait);
        } else {
            CompletableFuture<Message> answer = new CompletableFuture<>();
            RequestCallback callback = new RequestCallback() {
                @Override
                public void onSuccess(Message found) {
                    answer.complete(found);
                }

                @Override
                public void onException(Throwable failure) {
                    answer.completeExceptionally(failure);
                }
            };
            if (fixed == null) {
                producer.request(message, callback, wait);
            } else {
                producer.request(message, fixed, callback, wait);
            }
            reply = answer.get(wait + 5_000, TimeUnit.MILLISECONDS);
        }
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("body", new String(reply.getBody(), StandardCharsets.UTF_8));
        shown.put("properties", new LinkedHashMap<>(reply.getProperties()));
        return shown;
    }

    private Object recall(Args args) throws Exception {
        return Optional.call(named(args), "recallMessage", args.text("topic"), args.text("handle"));
    }

    private Object queryKey(Args args) throws Exception {
        QueryResult found = named(args).queryMessage(args.text("topic"), args.text("key"), args.number("max", 32),
            args.large("begin", 0), args.large("end", System.currentTimeMillis() + 60_000));
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("messages", Messages.showAll(found.getMessageList()));
        shown.put("indexUpdated", found.getIndexLastUpdateTimestamp());
        return shown;
    }

    private Object viewUnique(Args args) throws Exception {
        MessageExt found =
            named(args).getDefaultMQProducerImpl().queryMessageByUniqKey(args.text("topic"), args.text("msgId"));
        return found == null ? null : Messages.show(found);
    }

    private Object offsets(Args args) throws Exception {
        DefaultMQProducer producer = named(args);
        MessageQueue queue = Messages.queue(args);
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("min", producer.minOffset(queue));
        shown.put("max", producer.maxOffset(queue));
        shown.put("earliest", producer.earliestMsgStoreTime(queue));
        if (args.has("time")) {
            shown.put("found", producer.searchOffset(queue, args.large("time", 0)));
        }
        return shown;
    }

    /**
     * A message's properties select the result of its local transaction and the answer to a later check. A producer that
     * is undecided answers each check with "unknown", until the test lets it decide.
     */
    private static final class ByProperty implements TransactionListener {
        private final List<Map<String, Object>> checked;
        private final AtomicBoolean undecided;

        ByProperty(List<Map<String, Object>> checked, AtomicBoolean undecided) {
            this.checked = checked;
            this.undecided = undecided;
        }

        private static LocalTransactionState state(String outcome) {
            switch (String.valueOf(outcome)) {
                case "commit":
                    return LocalTransactionState.COMMIT_MESSAGE;
                case "rollback":
                    return LocalTransactionState.ROLLBACK_MESSAGE;
                default:
                    return LocalTransactionState.UNKNOW;
            }
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state(message.getProperty("outcome"));
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            checked.add(Messages.show(message));
            return undecided.get() ? LocalTransactionState.UNKNOW : state(message.getProperty("whenAsked"));
        }
    }
}
