package bus

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
)

func TestStoredReceiptsAreRead(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		said  string
		plain bool
		want  Receipt
		err   error
	}{
		"it is stored":                  {`{"stream":"m-a-memory","seq":18446744073709551615}`, true, Receipt{Seq: 1<<64 - 1}, nil},
		"with spaces":                   {`{"stream":"m-a-memory", "seq":7}`, false, Receipt{Seq: 7}, nil},
		"in a domain":                   {`{"stream":"m-a-memory","domain":"hub","seq":7}`, false, Receipt{Seq: 7}, nil},
		"it was there":                  {`{"stream":"m-a-memory","seq":7,"duplicate":true}`, false, Receipt{Seq: 7, Duplicate: true}, nil},
		"there is another in its place": {`{"error":{"code":400,"err_code":10071},"stream":"m-a-memory","seq":0}`, false, Receipt{Duplicate: true}, nil},
		"another one is on its way":     {`{"error":{"code":400,"err_code":10164},"stream":"m-a-memory","seq":0}`, false, Receipt{}, ErrInProcess},
		"there is no room":              {`{"error":{"code":503,"err_code":10077},"stream":"m-a-memory","seq":0}`, false, Receipt{}, ErrQueueFull},
		"a number that is none":         {`{"stream":"m-a-memory","seq":-1}`, false, Receipt{}, ErrUnknown},
		"a number too large":            {`{"stream":"m-a-memory","seq":18446744073709551616}`, false, Receipt{}, ErrUnknown},
		"half":                          {`{"stream":"m-a-memory","seq":7`, false, Receipt{}, ErrUnknown},
		"another stream took it":        {`{"stream":"all","seq":7}`, true, Receipt{}, ErrNoQueue},
		"another stream had it":         {`{"stream":"all","seq":7,"duplicate":true}`, false, Receipt{}, ErrNoQueue},
		"another stream refused it":     {`{"error":{"code":400,"err_code":10071},"stream":"all","seq":0}`, false, Receipt{}, ErrNoQueue},
		"a host took it":                {`{"stream":"forwarded","seq":1}`, true, Receipt{Seq: 1}, nil},
		"nothing":                       {``, false, Receipt{}, ErrUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if _, _, plain := plainAck([]byte(test.said)); plain != test.plain {
				t.Errorf("plain is %v", plain)
			}
			got, err := Message{Stream: "m-a-memory", Missing: ErrNoQueue, memory: true}.storedReceipt([]byte(test.said))
			if got != test.want || !errors.Is(err, test.err) {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// What is read without a parser of JSON is what a parser reads.
func FuzzPlainAck(f *testing.F) {
	f.Add([]byte(`{"stream":"m-a-memory","seq":7}`))
	f.Add([]byte(`{"stream":"m","seq":7,"duplicate":true}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		stream, seq, ok := plainAck(data)
		if !ok {
			return
		}
		var ack struct {
			Error     *apiError `json:"error"`
			Stream    string    `json:"stream"`
			Seq       uint64    `json:"seq"`
			Duplicate bool      `json:"duplicate"`
		}
		if err := json.Unmarshal(data, &ack); err == nil && (ack.Stream != string(stream) || ack.Seq != seq || ack.Error != nil || ack.Duplicate) {
			t.Errorf("%q was read as %d, and is %+v", data, seq, ack)
		}
	})
}

func TestFullStoresAreToldFromFullQueues(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		code           int
		description    string
		inFile, memory error
	}{
		"the stream's limit":        {codeStoreFailed, "maximum bytes exceeded", ErrQueueFull, ErrQueueFull},
		"more than a file may hold": {codeStoreFailed, "message too large", ErrTooLarge, ErrTooLarge},
		"the account's limit":       {codeAccountExceeded, "resource limits exceeded for account", ErrStoreFull, ErrQueueFull},
		"the server's limit":        {codeNoResources, "insufficient resources", ErrStoreFull, ErrQueueFull},
		"no space for a stream":     {codeStorageExceeded, "insufficient storage resources available", ErrStoreFull, ErrQueueFull},
		"a full disk":               {10049, "mkdir: no space left on device", ErrStoreFull, ErrUnknown},
	} {
		data := fmt.Appendf(nil, `{"error":{"code":503,"err_code":%d,"description":%q},"stream":"s","seq":0}`, test.code, test.description)
		if _, err := (Message{Stream: "s"}).storedReceipt(data); !errors.Is(err, test.inFile) {
			t.Errorf("%s, on file: %v", name, err)
		}
		if _, err := (Message{Stream: "s", memory: true}).storedReceipt(data); !errors.Is(err, test.memory) {
			t.Errorf("%s, in memory: %v", name, err)
		}
	}
}
