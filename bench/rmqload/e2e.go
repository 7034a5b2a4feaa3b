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

// e2e has -conns consumers wait by long polls, each on a connection and a queue of its own, while a few connections
// send -rate messages a second in all, by the clock and whatever becomes of them. Each body begins with the time at
// which its frame was about to be made, in nanoseconds of this process's monotonic clock, and whether it counts: those
// do that are due in the measured time. Which of them have not arrived some seconds after its end have failed.
//
// late_p99_ms: how much later than planned messages were sent; the load is what it says only where this is small.

const (
	senders  = 8
	suspend  = 15000 // milliseconds that a poll may wait
	lastWait = 5 * time.Second
	stamp    = 9 // bytes of a body that are used
)

var begun = time.Now()

func clock() time.Duration { return time.Since(begun) }

type e2eRun struct {
	planned []time.Duration // when each message is due, since the start
	counted []bool
	counts  int

	mu   sync.Mutex
	lat  []int64       // of those that count
	all  chan struct{} // closed when all of these have arrived
	late []int64
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

// plan decides when each message is sent. It ends the program where the arguments leave no sense to that.
func (run *e2eRun) plan() {
	if *conns > *topics**queues || *size < stamp || *rate <= 0 {
		exit("e2e", fmt.Errorf("every consumer needs a queue of its own (-topics, -queues), a body %d bytes, and -rate has to be over 0", stamp))
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

// place is the topic and the queue of a consumer.
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

// consume takes what comes to one queue; polling is called when the first poll is under way.
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
		case 19, 20: // nothing until the poll has ended, or it shall be asked again
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
			return fmt.Errorf("a body of %d bytes is none of ours", len(body))
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
