// Drives the Go client for the tests, in the same way as the Java driver: one JSON request a line on standard input,
// one JSON answer a line on standard output. What the client itself prints goes to standard error.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

type spec struct {
	Body  string `json:"body"`
	Tags  string `json:"tags"`
	Keys  string `json:"keys"`
	Order string `json:"order"`
}

type request struct {
	ID        int               `json:"id"`
	Op        string            `json:"op"`
	Name      string            `json:"name"`
	Group     string            `json:"group"`
	Namesrv   string            `json:"namesrv"`
	Topic     string            `json:"topic"`
	Mode      string            `json:"mode"`
	Subscribe map[string]string `json:"subscribe"`
	Orderly   bool              `json:"orderly"`
	FailUntil int32             `json:"failUntil"`
	Messages  []spec            `json:"messages"`
	Count     int               `json:"count"`
	Wait      int               `json:"wait"`
	AccessKey string            `json:"accessKey"`
	SecretKey string            `json:"secretKey"`
}

type object map[string]any

// Without an access key the client signs nothing. The client has no TLS.
func (r request) credentials() primitive.Credentials {
	return primitive.Credentials{AccessKey: r.AccessKey, SecretKey: r.SecretKey}
}

// A receiver keeps what its consumer was given until the test asks for it.
type receiver struct {
	consumer rocketmq.PushConsumer
	lock     sync.Mutex
	seen     []object
}

type driver struct {
	lock      sync.Mutex
	producers map[string]rocketmq.Producer
	receivers map[string]*receiver
}

func (d *driver) openProducer(r request) (any, error) {
	p, err := rocketmq.NewProducer(
		producer.WithGroupName(r.Group),
		producer.WithInstanceName(r.Name),
		producer.WithNsResolver(primitive.NewPassthroughResolver(strings.Split(r.Namesrv, ";"))),
		producer.WithSendMsgTimeout(10*time.Second),
		producer.WithQueueSelector(producer.NewHashQueueSelector()),
		producer.WithCredentials(r.credentials()),
	)
	if err != nil {
		return nil, err
	}
	d.lock.Lock()
	d.producers[r.Name] = p
	d.lock.Unlock()
	return nil, p.Start()
}

func (d *driver) send(r request) (any, error) {
	d.lock.Lock()
	p := d.producers[r.Name]
	d.lock.Unlock()
	var messages []*primitive.Message
	for _, s := range r.Messages {
		m := primitive.NewMessage(r.Topic, []byte(s.Body))
		if s.Tags != "" {
			m.WithTag(s.Tags)
		}
		if s.Keys != "" {
			m.WithKeys(strings.Split(s.Keys, " "))
		}
		if s.Order != "" {
			m.WithShardingKey(s.Order)
		}
		messages = append(messages, m)
	}
	if r.Mode == "oneway" {
		return nil, p.SendOneWay(context.Background(), messages...)
	}
	results := []object{}
	step := 1
	if r.Mode == "batch" {
		step = len(messages)
	}
	for i := 0; i < len(messages); i += step {
		sent, err := p.SendSync(context.Background(), messages[i:i+step]...)
		if err != nil {
			return nil, err
		}
		results = append(results, object{
			"status": int(sent.Status), "msgId": sent.MsgID, "offsetMsgId": sent.OffsetMsgID,
			"queue": sent.MessageQueue.QueueId, "offset": sent.QueueOffset,
		})
	}
	return results, nil
}

func (d *driver) openConsumer(r request) (any, error) {
	c, err := rocketmq.NewPushConsumer(
		consumer.WithGroupName(r.Group),
		consumer.WithInstance(r.Name),
		consumer.WithNsResolver(primitive.NewPassthroughResolver(strings.Split(r.Namesrv, ";"))),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(r.Orderly),
		consumer.WithConsumerModel(consumer.Clustering),
		consumer.WithCredentials(r.credentials()),
	)
	if err != nil {
		return nil, err
	}
	into := &receiver{consumer: c}
	take := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		into.lock.Lock()
		defer into.lock.Unlock()
		result := consumer.ConsumeSuccess
		for _, m := range messages {
			into.seen = append(into.seen, object{
				"topic": m.Topic, "queue": m.Queue.QueueId, "offset": m.QueueOffset, "body": string(m.Body),
				"tags": m.GetTags(), "keys": m.GetKeys(), "msgId": m.MsgId, "reconsume": m.ReconsumeTimes,
			})
			if m.ReconsumeTimes < r.FailUntil {
				result = consumer.ConsumeRetryLater
			}
		}
		return result, nil
	}
	for topic, expression := range r.Subscribe {
		selector := consumer.MessageSelector{Type: consumer.TAG, Expression: expression}
		if err := c.Subscribe(topic, selector, take); err != nil {
			return nil, err
		}
	}
	d.lock.Lock()
	d.receivers[r.Name] = into
	d.lock.Unlock()
	return nil, c.Start()
}

func (d *driver) received(r request) (any, error) {
	d.lock.Lock()
	from := d.receivers[r.Name]
	d.lock.Unlock()
	deadline := time.Now().Add(time.Duration(r.Wait) * time.Millisecond)
	for {
		from.lock.Lock()
		seen := append([]object{}, from.seen...)
		from.lock.Unlock()
		if len(seen) >= r.Count || time.Now().After(deadline) {
			return seen, nil
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (d *driver) close(r request) (any, error) {
	d.lock.Lock()
	defer d.lock.Unlock()
	if p, found := d.producers[r.Name]; found {
		delete(d.producers, r.Name)
		return nil, p.Shutdown()
	}
	from := d.receivers[r.Name]
	delete(d.receivers, r.Name)
	return nil, from.consumer.Shutdown()
}

func main() {
	// The client writes its log to standard output, which belongs to the answers here.
	out := os.Stdout
	os.Stdout = os.Stderr
	d := &driver{producers: map[string]rocketmq.Producer{}, receivers: map[string]*receiver{}}
	operations := map[string]func(request) (any, error){
		"producer.open": d.openProducer, "producer.send": d.send, "consumer.open": d.openConsumer,
		"consumer.received": d.received, "close": d.close,
	}
	var lock sync.Mutex
	answer := func(reply object) {
		line, _ := json.Marshal(reply)
		lock.Lock()
		defer lock.Unlock()
		fmt.Fprintln(out, string(line))
	}
	answer(object{"id": 0, "result": object{"client": "rocketmq-client-go/v2"}})
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		go func() {
			result, err := operations[r.Op](r)
			if err != nil {
				answer(object{"id": r.ID, "error": object{"type": fmt.Sprintf("%T", err), "message": err.Error()}})
				return
			}
			answer(object{"id": r.ID, "result": result})
		}()
	}
}
