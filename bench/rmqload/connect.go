// TLS (-tls-ca) for all modes, and the mode connect, which opens one connection after the other.

package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

var tlsCA = flag.String("tls-ca", "", "connect with TLS 1.3, and verify the broker with this file of CA certificates")

// secure is the configuration of TLS; nil without -tls-ca. It has no cache of sessions, so that each handshake is a full
// one. It offers one group for the key exchange only, which all brokers have: one that has to be negotiated costs a round
// trip more.
var secure = sync.OnceValue(func() *tls.Config {
	if *tlsCA == "" {
		return nil
	}
	text, err := os.ReadFile(*tlsCA)
	if err != nil {
		exit("CA certificates", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		exit("CA certificates", fmt.Errorf("%s has none in PEM", *tlsCA))
	}
	host, _, err := net.SplitHostPort(*addr)
	if err != nil {
		exit("-addr", err)
	}
	return &tls.Config{
		RootCAs:                     roots,
		ServerName:                  host,
		MinVersion:                  tls.VersionTLS13,
		CurvePreferences:            []tls.CurveID{tls.X25519},
		DynamicRecordSizingDisabled: true,
	}
})

// connect returns a connection to the broker, after the handshake if there is one.
func connect() (net.Conn, error) {
	config := secure()
	nc, err := net.Dial("tcp", *addr)
	if err != nil || config == nil {
		return nc, err
	}
	encrypted := tls.Client(nc, config)
	if err := encrypted.Handshake(); err != nil {
		nc.Close()
		return nil, err
	}
	if encrypted.ConnectionState().DidResume {
		nc.Close()
		return nil, errors.New("the handshake was not a full one")
	}
	return encrypted, nil
}

// connections opens connections one after the other, -conns at a time. On each it asks for the end of a queue and closes
// it when the reply has come: only then the broker has completed the handshake. What is counted as a message is such a
// connection, and its latency is the whole time.
func connections() {
	first := dial()
	rep, err := first.ask(30, endOf())
	if err != nil || rep.h.Code != 0 {
		exit("the end of a queue", fmt.Errorf("%v, reply %+v", err, rep))
	}
	first.Close()
	var lat []int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	stop := int32(0)
	for c := 0; c < *conns; c++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			mine := oneByOne(&stop)
			mu.Lock()
			lat = append(lat, mine...)
			mu.Unlock()
		}()
	}
	time.Sleep(*warm)
	el, fin := measured(&wg, &stop)
	<-fin
	report(lat, el, "")
}

func endOf() string { return `"topic":"` + *topic + `","queueId":"0"` }

// oneByOne opens connections until stop is set, and returns the latencies of those that were counted.
func oneByOne(stop *int32) []int64 {
	var mine []int64
	r := &reader{r: bufio.NewReaderSize(nil, 1<<12)}
	out := frame(nil, 30, 1, endOf(), nil)
	for atomic.LoadInt32(stop) == 0 {
		began := time.Now()
		err := once(r, out)
		if atomic.LoadInt32(&counting) == 0 {
			continue
		}
		if err != nil {
			atomic.AddInt64(&failed, 1)
			lastRemark.Store(err.Error())
			continue
		}
		mine = append(mine, int64(time.Since(began)))
		atomic.AddInt64(&done, 1)
		atomic.AddInt64(&msgs, 1)
		stopIfEnough(stop)
	}
	return mine
}

// once is one connection with one request.
func once(r *reader, request []byte) error {
	nc, err := connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	if _, err := nc.Write(request); err != nil {
		return err
	}
	r.r.Reset(nc)
	rep, err := r.read()
	if err == nil && rep.h.Code != 0 {
		err = fmt.Errorf("code %d %s", rep.h.Code, rep.h.Remark)
	}
	return err
}
