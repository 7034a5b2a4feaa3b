// The Java client's load for bench/sdk.py: sends for some seconds and prints one JSON line. Run by the source launcher.
// Arguments: NAMESRV TOPIC MODE(sync|async|autobatch) IN_FLIGHT SECONDS SIZE

import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

public class SdkLoad {
    private static final AtomicLong done = new AtomicLong();
    private static final AtomicLong failed = new AtomicLong();
    private static volatile boolean over;

    public static void main(String[] words) throws Exception {
        String topic = words[1];
        String mode = words[2];
        int inFlight = Integer.parseInt(words[3]);
        double seconds = Double.parseDouble(words[4]);
        byte[] body = new byte[Integer.parseInt(words[5])];
        DefaultMQProducer producer = new DefaultMQProducer("bench_java");
        producer.setNamesrvAddr(words[0]);
        producer.setCompressMsgBodyOverHowmuch(1 << 30);
        producer.start();
        if (mode.equals("autobatch")) {
            producer.setAutoBatch(true);
        }
        if (mode.equals("async")) {
            Semaphore slots = new Semaphore(inFlight);
            Thread sender = new Thread(() -> sendAll(producer, topic, body, slots));
            sender.setDaemon(true);
            sender.start();
        } else {
            for (int number = 0; number < inFlight; number++) {
                Thread sender = new Thread(() -> sendEach(producer, topic, body));
                sender.setDaemon(true);
                sender.start();
            }
        }
        Thread.sleep(4000); // warm-up of the JIT compiler
        long before = done.get();
        long began = System.nanoTime();
        Thread.sleep((long) (seconds * 1000));
        double rate = (done.get() - before) * 1e9 / (System.nanoTime() - began);
        over = true;
        System.out.println("{\"msg_s\": " + rate + ", \"failed\": " + failed.get() + "}");
        System.exit(0);
    }

    private static void sendEach(DefaultMQProducer producer, String topic, byte[] body) {
        while (!over) {
            try {
                producer.send(new Message(topic, body));
                done.incrementAndGet();
            } catch (Exception error) {
                failed.incrementAndGet();
            }
        }
    }

    private static void sendAll(DefaultMQProducer producer, String topic, byte[] body, Semaphore slots) {
        SendCallback callback = new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                done.incrementAndGet();
                slots.release();
            }

            @Override
            public void onException(Throwable error) {
                failed.incrementAndGet();
                slots.release();
            }
        };
        while (!over) {
            try {
                slots.acquire();
                producer.send(new Message(topic, body), callback);
            } catch (Exception error) {
                failed.incrementAndGet();
                slots.release();
            }
        }
    }
}
