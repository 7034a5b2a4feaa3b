package main

import (
	"crypto/hmac"
	"crypto/sha1"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"hash"
	"os"
	"sort"
	"strconv"
	"sync"
)

var (
	accessKey = flag.String("access-key", "", "sign all requests as this user")
	secretKey = flag.String("secret-key", "", "the user's password")
)

// signer has the memory to sign one request.
type signer struct {
	mac    hash.Hash
	fields []field
	text   []byte
	sum    []byte
}

// field is a name, and the place of its value in signer.text.
type field struct {
	name       string
	begin, end int
}

var signers = sync.Pool{New: func() any { return &signer{mac: hmac.New(sha1.New, []byte(*secretKey))} }}

// signature appends the fields AccessKey and Signature to ext, the content of an extFields object as JSON: the signature
// is the HMAC of all values in the order of their names, and of the body.
func signature[text string | []byte](buf []byte, ext text, body []byte) []byte {
	s := signers.Get().(*signer)
	defer signers.Put(s)
	s.fields, s.text = s.fields[:0], append(s.text[:0], *accessKey...)
	s.fields = append(s.fields, field{"AccessKey", 0, len(s.text)})
	for at := 0; at < len(ext); at++ {
		name, next := quoted(nil, ext, at)
		begin := len(s.text)
		if next >= len(ext) || ext[next] != ':' {
			malformed(ext)
		}
		s.text, at = quoted(s.text, ext, next+1)
		s.fields = append(s.fields, field{string(name), begin, len(s.text)})
		if at < len(ext) && ext[at] != ',' {
			malformed(ext)
		}
	}
	sort.Slice(s.fields, func(a, b int) bool { return s.fields[a].name < s.fields[b].name })
	s.mac.Reset()
	for _, one := range s.fields {
		s.mac.Write(s.text[one.begin:one.end])
	}
	s.mac.Write(body)
	s.sum = s.mac.Sum(s.sum[:0])
	if len(ext) > 0 {
		buf = append(buf, ',')
	}
	buf = append(append(append(buf, `"AccessKey":`...), strconv.Quote(*accessKey)...), `,"Signature":"`...)
	buf = base64.StdEncoding.AppendEncode(buf, s.sum)
	return append(buf, '"')
}

// quoted appends the text that begins at ext[at], and returns the place behind it.
func quoted[text string | []byte](out []byte, ext text, at int) ([]byte, int) {
	if at >= len(ext) || ext[at] != '"' {
		malformed(ext)
	}
	begin, length := at, len(out)
	for at++; at < len(ext) && ext[at] != '"'; at++ {
		switch {
		case ext[at] != '\\':
			out = append(out, ext[at])
		case at+5 < len(ext) && ext[at+5] <= '9' && string(ext[at:at+5]) == `\u000`: // as in all properties
			out = append(out, ext[at+5]-'0')
			at += 5
		default:
			return unescaped(out[:length], ext, begin)
		}
	}
	return out, at + 1
}

// unescaped does the same for a text with any escapes.
func unescaped[text string | []byte](out []byte, ext text, at int) ([]byte, int) {
	end := at + 1
	for end < len(ext) && ext[end] != '"' {
		if ext[end] == '\\' {
			end++
		}
		end++
	}
	var plain string
	if end >= len(ext) || json.Unmarshal([]byte(ext[at:end+1]), &plain) != nil {
		malformed(ext)
	}
	return append(out, plain...), end + 1
}

func malformed[text string | []byte](ext text) {
	fmt.Fprintf(os.Stderr, "cannot sign %s\n", string(ext))
	os.Exit(1)
}
