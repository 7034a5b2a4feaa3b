package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"strings"
)

const longest = 32 * 1024 // bytes of a body

// message is one line of the file that bench/mixed.py writes.
type message struct {
	Topic string `json:"topic"`
	Queue int    `json:"queue_id"`
	Body  int    `json:"body"`
	Text  string `json:"text"`
	parts []part
}

// part is a piece of a message's properties: the text, the text escaped for a JSON string, and the placeholder behind.
type part struct {
	text, json string
	then       string
}

const numberMark, uniqueMark = "{number}", "{unique}"

// mixedTraffic has all messages; each connection cycles through them from its own start.
type mixedTraffic struct {
	messages []message
	noise    []byte
}

var traffic *mixedTraffic

func readMixed(path string) *mixedTraffic {
	file, err := os.Open(path)
	if err != nil {
		exit("mixed messages", err)
	}
	defer file.Close()
	t := &mixedTraffic{noise: make([]byte, 2*longest)}
	rand.New(rand.NewSource(22)).Read(t.noise)
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			exit("mixed messages", err)
		}
		if m.Topic == "" || m.Body < 0 || m.Body > longest {
			exit("mixed messages", fmt.Errorf("line %d: expected a topic, and a body of 0 to %d bytes", len(t.messages)+1, longest))
		}
		m.cut()
		t.messages = append(t.messages, m)
	}
	if err := lines.Err(); err != nil || len(t.messages) == 0 {
		exit("mixed messages", fmt.Errorf("no messages in %s: %v", path, err))
	}
	return t
}

// cut splits the text at its placeholders.
func (m *message) cut() {
	for rest := m.Text; rest != ""; {
		p := part{text: rest}
		for _, mark := range []string{numberMark, uniqueMark} {
			if at := strings.Index(rest, mark); at >= 0 && at < len(p.text) {
				p.text, p.then = rest[:at], mark
			}
		}
		rest = rest[len(p.text)+len(p.then):]
		var quoted bytes.Buffer
		encoder := json.NewEncoder(&quoted)
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(p.text); err != nil {
			exit("mixed messages", err)
		}
		p.json = strings.TrimSuffix(quoted.String(), "\n")
		p.json = p.json[1 : len(p.json)-1]
		m.parts = append(m.parts, p)
	}
}

// properties appends the properties of the message with this number; quoted means escaped for a JSON string.
func (m *message) properties(b []byte, number int, quoted bool) []byte {
	for i := range m.parts {
		p := &m.parts[i]
		if quoted {
			b = append(b, p.json...)
		} else {
			b = append(b, p.text...)
		}
		switch p.then {
		case numberMark:
			b = strconv.AppendInt(b, int64(number), 10)
		case uniqueMark:
			b = appendUnique(b)
		}
	}
	return b
}

func (t *mixedTraffic) topics() []string {
	var all []string
	seen := map[string]bool{}
	for _, m := range t.messages {
		if !seen[m.Topic] {
			seen[m.Topic] = true
			all = append(all, m.Topic)
		}
	}
	return all
}

func (t *mixedTraffic) queues() int {
	most := 0
	for _, m := range t.messages {
		most = max(most, m.Queue+1)
	}
	return most
}

// mixedConn makes the messages of one connection: the same sequence in each run, except for times and unique keys.
type mixedConn struct {
	t       *mixedTraffic
	made    *maker
	c, sent int
}

// of returns the messages of connection c; nil without -mixed.
func (t *mixedTraffic) of(c int, made *maker) *mixedConn {
	if t == nil {
		return nil
	}
	return &mixedConn{t: t, made: made, c: c}
}

// next returns the next message, its number among those of all connections, and its body.
func (s *mixedConn) next() (*message, int, []byte) {
	at := s.c*len(s.t.messages) / *conns + s.sent
	m := &s.t.messages[at%len(s.t.messages)]
	number := s.sent**conns + s.c
	s.sent++
	begin := m.Body * 31 % longest
	return m, number, s.t.noise[begin : begin+m.Body]
}

func (s *mixedConn) send(out []byte, opaque int) []byte {
	m, number, body := s.next()
	ext := sendHead(s.made.ext[:0], m.Topic, m.Queue)
	ext = m.properties(ext, number, true)
	s.made.ext = sendTail(ext, false)
	return frame(out, 310, opaque, s.made.ext, body)
}

// half appends a half message, and returns the size of its body too.
func (s *mixedConn) half(out []byte, opaque int) ([]byte, int) {
	m, number, body := s.next()
	ext := halfHead(s.made.ext[:0], m.Topic, m.Queue)
	ext = m.properties(ext, number, true)
	s.made.ext = sendTail(ext, false)
	return frame(out, 310, opaque, s.made.ext, body), len(body)
}

// batch appends a request with -batch messages, all of them to the topic and queue of the first.
func (s *mixedConn) batch(out []byte, opaque int) []byte {
	var first *message
	all := s.made.items[:0]
	for i := 0; i < *batch; i++ {
		m, number, body := s.next()
		if first == nil {
			first = m
		}
		at := len(all)
		all = beginItem(all, body)
		all = m.properties(all, number, false)
		endItem(all, at, len(body))
	}
	ext := sendHead(s.made.ext[:0], first.Topic, first.Queue)
	ext = append(ext, `WAIT\u0001true\u0002`...)
	s.made.ext, s.made.items = sendTail(ext, true), all
	return frame(out, 320, opaque, s.made.ext, all)
}
