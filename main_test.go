package holdfast

import (
	"testing"

	"github.com/holdfast-go/holdfast/internal/leaktest"
	"github.com/holdfast-go/holdfast/internal/redistest"
)

func TestMain(m *testing.M) {
	redistest.RunChild(map[string]func(){
		"holder": childHolder,
		"killed": childKilled,
		"fips":   childFIPS,
		"job":    childJob,

		"service": childService,
		"pod":     childPod,

		"line-one":   childLine,
		"line-crowd": childCrowd,
	})
	leaktest.Main(m)
}
