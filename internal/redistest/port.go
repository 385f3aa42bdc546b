package redistest

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"testing"
)

// Ports are taken from below those that kernels give to outgoing connections: a
// server that is killed and restarted would else find its port in use by some client
// now and then.
const firstPort, portCount = 20000, 12000

var reserved = struct {
	mu    sync.Mutex
	ports map[int]bool
}{ports: map[int]bool{}}

// reservePort returns a port that no server of this process has, and nobody used a
// moment ago. It is given back at the end of t.
func reservePort(t testing.TB) int {
	t.Helper()
	for range 1000 {
		port := firstPort + rand.IntN(portCount)
		if reserve(port) {
			t.Cleanup(func() { giveBack(port) })
			return port
		}
	}
	t.Fatal("redistest: no free port")
	return 0
}

func reserve(port int) bool {
	reserved.mu.Lock()
	defer reserved.mu.Unlock()
	if reserved.ports[port] {
		return false
	}
	l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		return false
	}
	_ = l.Close()
	reserved.ports[port] = true
	return true
}

func giveBack(port int) {
	reserved.mu.Lock()
	defer reserved.mu.Unlock()
	delete(reserved.ports, port)
}
