package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"
)

// e2e runs -conns consumers that wait in long polls, each on its own connection and queue, while a few connections
// send -rate messages a second in total, by the clock and independent of replies. Each body begins with the time just
// before its frame was made, in nanoseconds of this process's monotonic clock, and a flag whether it counts. Messages
// that are due in the measured time count; those that have not arrived some seconds after its end are failures.
//
// late_p99_ms: the delay of sends against their plan. The load has the stated rate only if this is small.

const (
	senders  = 8
	suspend  = 15000 // milliseconds that a poll may wait
	lastWait = 5 * time.Second
	stamp    = 9 // bytes at the start of a body for the time and the flag
)

var begun = time.Now()

func clock() time.Duration { return time.Since(begun) }

type e2eRun struct {
	planned []time.Duration // the time at which each message is due, since the start
	counted []bool
	counts  int // the number of messages that count

	mu   sync.Mutex
	lat  []int64       // latencies of the messages that count
	all  chan struct{} // closed when all of these have arrived
	late []int64       // delays of their sends
}

func e2e() {
	run := &e2eRun{all: make(chan struct{})}
	run.plan()
	prepare()
	var polling, sending sync.WaitGroup
	for i := 0; i < *conns; i++ {
		polling.Add(1)
		go run.consume(i, polling.Done)
	}
	polling.Wait()
	start := clock()
	for s := 0; s < senders; s++ {
		sending.Add(1)
		go func() {
			defer sending.Done()
			run.produce(s, start)
		}()
	}
	sending.Wait()
	select {
	case <-run.all:
	case <-time.After(lastWait):
	}
	run.mu.Lock()
	if lost := run.counts - len(run.lat); lost > 0 {
		failed += int64(lost)
		lastRemark.Store(fmt.Sprintf("%d of %d messages have not arrived", lost, run.counts))
	}
	msgs, done = int64(len(run.lat)), int64(len(run.lat))
	report(run.lat, dur.Seconds(), fmt.Sprintf(`,"late_p99_ms":%.3f`, percentiles(run.late)(.99)))
}

// plan sets the time of each message. It exits for arguments that do not fit together.
func (run *e2eRun) plan() {
	if *conns > *topics**queues || *size < stamp || *rate <= 0 {
		exit("e2e", fmt.Errorf("each consumer needs its own queue (-topics, -queues), -size must be at least %d, and -rate over 0", stamp))
	}
	for i := 0; ; i++ {
		due := time.Duration(float64(i) / *rate * float64(time.Second))
		if due >= *warm+*dur {
			break
		}
		counts := due >= *warm
		run.planned = append(run.planned, due)
		run.counted = append(run.counted, counts)
		if counts {
			run.counts++
		}
	}
	if run.counts == 0 {
		exit("e2e", errors.New("no message is due in the measured time"))
	}
}

// place returns the topic and the queue of a consumer.
func place(i int) (string, int) { return names[i / *queues], i % *queues }

func (run *e2eRun) produce(s int, start time.Duration) {
	l := dial()
	defer l.Close()
	l.SetDeadline(time.Now().Add(*warm + *dur + lastWait))
	replies := make(chan int, 1)
	sent := 0
	for at := s; at < len(run.planned); at += senders {
		sent++
	}
	go func() {
		good := 0
		for i := 0; i < sent; i++ {
			rep, err := l.r.read()
			if err != nil {
				fmt.Fprintln(os.Stderr, "reply to a send:", err)
				break
			}
			if rep.h.Code == 0 {
				good++
			} else {
				fmt.Fprintln(os.Stderr, "reply to a send: code", rep.h.Code, rep.h.Remark)
			}
		}
		replies <- good
	}()
	body := make([]byte, *size)
	made := &maker{}
	var out []byte
	var late []int64
	for at := s; at < len(run.planned); at += senders {
		due := start + run.planned[at]
		if wait := due - clock(); wait > 0 {
			time.Sleep(wait)
		}
		now := clock()
		binary.BigEndian.PutUint64(body, uint64(now))
		body[8] = 0
		if run.counted[at] {
			body[8] = 1
			late = append(late, int64(now-due))
		}
		topic, queue := place(at % *conns)
		l.opaque++
		out = made.send(out[:0], 310, l.opaque, topic, queue, body)
		if _, err := l.Write(out); err != nil {
			fmt.Fprintln(os.Stderr, "send:", err)
			break
		}
	}
	good := <-replies
	run.mu.Lock()
	failed += int64(sent - good)
	run.late = append(run.late, late...)
	run.mu.Unlock()
}

// consume reads the new messages of one queue; it calls polling once the first poll is in flight.
func (run *e2eRun) consume(i int, polling func()) {
	l := dial()
	topic, queue := place(i)
	rep, err := l.ask(30, `"topic":"`+topic+`","queueId":"`+strconv.Itoa(queue)+`"`)
	if err != nil || rep.h.Code != 0 {
		exit("the end of a queue", fmt.Errorf("%v, code %d %s", err, rep.h.Code, rep.h.Remark))
	}
	offset, err := strconv.ParseInt(rep.h.Ext["offset"], 10, 64)
	if err != nil {
		exit("the end of a queue", err)
	}
	for first := true; ; first = false {
		if err := l.write(11, pullFields(topic, queue, offset, *batch, 6, suspend), nil); err != nil {
			exit("pull", err)
		}
		if first {
			polling()
		}
		rep, err := l.r.read()
		now := clock()
		if err != nil {
			exit("pull", err)
		}
		switch rep.h.Code {
		case 0:
			if err := run.received(rep.body, now); err != nil {
				exit("pull", err)
			}
			offset = rep.next
		case 19, 20: // no message during the poll, or a request to poll again
		default:
			exit("pull", fmt.Errorf("code %d %s", rep.h.Code, rep.h.Remark))
		}
	}
}

func (run *e2eRun) received(records []byte, now time.Duration) error {
	if _, err := countRecords(records); err != nil {
		return err
	}
	run.mu.Lock()
	defer run.mu.Unlock()
	for b := records; len(b) > 0; b = b[binary.BigEndian.Uint32(b):] {
		body := bodyOf(b)
		if len(body) < stamp {
			return fmt.Errorf("a body of %d bytes was not sent by this program", len(body))
		}
		if body[8] == 1 {
			bytesN += int64(binary.BigEndian.Uint32(b))
			run.lat = append(run.lat, int64(now)-int64(binary.BigEndian.Uint64(body)))
			if len(run.lat) == run.counts {
				close(run.all)
			}
		}
	}
	return nil
}
