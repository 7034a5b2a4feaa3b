package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// transactions sends half messages and commits each one as soon as its reply has come. A message counts when the reply
// to its commit is there; its latency begins with the half message. Ends are requests with replies, unlike those of
// Java's client, so that what is counted has happened. With -mixed the messages are of different kinds, and every eighth
// is rolled back.
func transactions() {
	prepare()
	body := bytes.Repeat([]byte("x"), *size)
	var lat []int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	stop := int32(0)
	for c := 0; c < *conns; c++ {
		wg.Add(1)
		go func(c int) {
			defer wg.Done()
			mine := commits(c, body, &stop)
			mu.Lock()
			lat = append(lat, mine...)
			mu.Unlock()
		}(c)
	}
	time.Sleep(*warm)
	el, fin := measured(&wg, &stop)
	<-fin
	report(lat, el, "")
}

// startedAt is a transaction in flight: when its half message was sent, and the bytes of its body.
type startedAt struct {
	at   time.Time
	size int
}

// commits runs the transactions of one connection, *window at a time, and returns their latencies. An even opaque is
// that of a half message, the odd one after it that of its commit.
func commits(c int, body []byte, stop *int32) []int64 {
	nc, err := connect()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer nc.Close()
	r := &reader{r: bufio.NewReaderSize(nc, 1<<18)}
	w := bufio.NewWriterSize(nc, 1<<18)
	drawn := traffic.of(c, &maker{})
	pending := map[int]startedAt{}
	var mine []int64
	var out, ext []byte
	opaque, inflight := 0, 0
	for {
		for inflight < *window && atomic.LoadInt32(stop) == 0 {
			opaque += 2
			size := len(body)
			if drawn != nil {
				out, size = drawn.half(out[:0], opaque)
			} else {
				ext = halfExt(ext[:0], topicOf(c, opaque), (c+opaque/2)%*queues)
				out = frame(out[:0], 310, opaque, ext, body)
			}
			pending[opaque] = startedAt{time.Now(), size}
			w.Write(out)
			inflight++
		}
		w.Flush()
		if inflight == 0 {
			return mine
		}
		rep, err := r.read()
		if err != nil {
			fmt.Fprintln(os.Stderr, "read:", err)
			atomic.AddInt64(&failed, 1)
			return mine
		}
		half := rep.h.Opaque &^ 1
		if rep.h.Code == 0 && rep.h.Opaque == half {
			state := "8"
			if drawn != nil && half/2%8 == 0 {
				state = "12"
			}
			ext = endExt(ext[:0], rep.head, state)
			out = frame(out[:0], 37, half+1, ext, nil)
			w.Write(out)
			continue
		}
		inflight--
		began := pending[half]
		d := time.Since(began.at)
		delete(pending, half)
		if atomic.LoadInt32(&counting) == 0 {
			continue
		}
		if rep.h.Code == 0 {
			mine = append(mine, int64(d))
			atomic.AddInt64(&done, 1)
			atomic.AddInt64(&msgs, 1)
			atomic.AddInt64(&bytesN, int64(began.size))
		} else {
			atomic.AddInt64(&failed, 1)
			lastRemark.Store(fmt.Sprintf("code %d %s", rep.h.Code, rep.h.Remark))
		}
		stopIfEnough(stop)
	}
}

// halfExt appends the fields of a half message.
func halfExt(b []byte, topic string, q int) []byte {
	b = append(halfHead(b, topic, q), `UNIQ_KEY\u0001`...)
	b = appendUnique(b)
	b = append(b, `\u0002TAGS\u0001TagA\u0002`...)
	return sendTail(b, false)
}

// endExt appends the fields of the end of the half message whose reply has this header: 8 commits it, 12 rolls it back.
func endExt(b, head []byte, state string) []byte {
	b = append(b, `"producerGroup":"load","tranStateTableOffset":"`...)
	offset, _ := intAfter(head, `"queueOffset"`)
	b = strconv.AppendInt(b, offset, 10)
	b = append(b, `","commitLogOffset":"`...)
	id := text(head, `"msgId":"`)
	place, _ := strconv.ParseInt(id[len(id)-16:], 16, 64)
	b = strconv.AppendInt(b, place, 10)
	b = append(b, `","commitOrRollback":"`...)
	b = append(b, state...)
	b = append(b, `","fromTransactionCheck":"false","msgId":"`...)
	unique := text(head, `"transactionId":"`)
	b = append(b, unique...)
	b = append(b, `","transactionId":"`...)
	b = append(b, unique...)
	return append(b, '"')
}

// text returns the text after a key of a JSON header; 16 zeros if there is none.
func text(head []byte, key string) string {
	i := bytes.Index(head, []byte(key))
	if i < 0 {
		return "0000000000000000"
	}
	rest := head[i+len(key):]
	return string(rest[:bytes.IndexByte(rest, '"')])
}
