package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"strconv"
)

const creating = 16 // requests to create a topic in flight

// exit ends the program for an error that makes a measurement impossible.
func exit(what string, err error) {
	fmt.Fprintln(os.Stderr, what+":", err)
	os.Exit(1)
}

// link is a connection for requests that are sent one by one.
type link struct {
	net.Conn
	r      *reader
	opaque int
}

func dial() *link {
	nc, err := connect()
	if err != nil {
		exit("connecting", err)
	}
	return &link{Conn: nc, r: &reader{r: bufio.NewReaderSize(nc, 1<<16)}}
}

func (l *link) write(code int, ext string, body []byte) error {
	l.opaque++
	_, err := l.Write(frame(nil, code, l.opaque, ext, body))
	return err
}

// ask sends a request and reads its reply with the whole header.
func (l *link) ask(code int, ext string) (*reply, error) {
	if err := l.write(code, ext, nil); err != nil {
		return nil, err
	}
	rep, err := l.r.read()
	if err != nil {
		return nil, err
	}
	return rep, json.Unmarshal(rep.head, &rep.h)
}

// topicName returns the name of the i-th topic; a single topic has the name given by -topic.
func topicName(i int) string {
	if *topics == 1 {
		return *topic
	}
	return fmt.Sprintf("%s%04d", *topic, i)
}

var names []string

// topicOf returns the topic of a message. The messages of each connection are scattered over all topics.
func topicOf(c, number int) string {
	if len(names) == 0 {
		return *topic
	}
	return names[(c*7919+number*104729)%len(names)]
}

// prepare reads the mixed messages and creates the topics, except a single one, which the first send creates.
func prepare() {
	if *mixed != "" {
		traffic = readMixed(*mixed)
		createTopics(traffic.topics(), traffic.queues())
	}
	if *topics > 1 || *mode == "e2e" {
		for i := 0; i < *topics; i++ {
			names = append(names, topicName(i))
		}
		createTopics(names, *queues)
	}
}

func createTopics(names []string, queues int) {
	l := dial()
	defer l.Close()
	number := strconv.Itoa(queues)
	for asked, answered := 0, 0; answered < len(names); answered++ {
		for ; asked < len(names) && asked-answered < creating; asked++ {
			ext := `"topic":"` + names[asked] + `","defaultTopic":"TBW102","readQueueNums":"` + number + `","writeQueueNums":"` + number +
				`","perm":"6","topicFilterType":"SINGLE_TAG","topicSysFlag":"0","order":"false"`
			if err := l.write(17, ext, nil); err != nil {
				exit("creating topics", err)
			}
		}
		rep, err := l.r.read()
		if err == nil && rep.h.Code != 0 {
			err = fmt.Errorf("code %d %s", rep.h.Code, rep.h.Remark)
		}
		if err != nil {
			exit("creating topics", err)
		}
	}
}
