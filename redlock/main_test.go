package redlock

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) {
	redistest.RunChild(map[string]func(){
		"holder": childHolder,
		"voter":  childVoter,
	})
	leaktest.Main(m)
}
