package worker

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// Environment is what the host says in the environment of the process.
type Environment struct {
	// Stage is the stage's name, Worker the index of the worker in it, from 0, and
	// Incarnation how often that one has been started, from 1. For logs.
	Stage               string
	Worker, Incarnation int
	// Rank, LocalRank and WorldSize are the process's in its gang: 0, 0 and 1 where
	// it is alone. Then there is no master.
	Rank, LocalRank, WorldSize int
	MasterAddr, MasterPort     string

	socket string
	// lifeline is a file descriptor; -1 is none.
	lifeline int
}

// ErrNoHost says that the process was not started by a stage's host.
var ErrNoHost = errors.New("STAGEMESH_SOCKET is not set: a worker is started by the host of a stage, see sdk/PROTOCOL.md")

func readEnvironment(getenv func(string) string) (Environment, error) {
	e := Environment{
		Stage: getenv("STAGEMESH_STAGE"), MasterAddr: getenv("MASTER_ADDR"), MasterPort: getenv("MASTER_PORT"),
		socket: getenv("STAGEMESH_SOCKET"),
	}
	if e.socket == "" {
		return e, ErrNoHost
	}
	for _, v := range []struct {
		name     string
		to       *int
		fallback int
	}{
		{"STAGEMESH_WORKER", &e.Worker, 0},
		{"STAGEMESH_INCARNATION", &e.Incarnation, 1},
		{"STAGEMESH_LIFELINE", &e.lifeline, -1},
		{"RANK", &e.Rank, 0},
		{"LOCAL_RANK", &e.LocalRank, 0},
		{"WORLD_SIZE", &e.WorldSize, 1},
	} {
		*v.to = v.fallback
		text := getenv(v.name)
		if text == "" {
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 {
			return e, fmt.Errorf("%w: %s is %q, and not a number", errEnvironment, v.name, text)
		}
		*v.to = n
	}
	if e.Rank >= e.WorldSize {
		return e, fmt.Errorf("%w: RANK is %d in a gang of %d", errEnvironment, e.Rank, e.WorldSize)
	}
	return e, nil
}

var errEnvironment = errors.New("environment")

func decodeStrictly(text []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return d.Decode(into)
}
