package main

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// median returns the middle of values, the mean of the two middle ones if their number
// is even; NaN of none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// percentile returns the smallest of values that at least p per cent of them do not
// exceed (the nearest rank, nothing interpolated); NaN of none. It sorts values.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	slices.Sort(values)
	rank := int(math.Ceil(p / 100 * float64(len(values))))
	return values[min(max(rank, 1), len(values))-1]
}

// cell writes the median of rounds with their spread: "12.3 (11.9–13)", "-2 (-3 to 1)".
func cell(rounds []float64) string {
	rounds = slices.DeleteFunc(slices.Clone(rounds), math.IsNaN)
	if len(rounds) == 0 {
		return "–"
	}
	text := number(median(rounds))
	low, high := number(slices.Min(rounds)), number(slices.Max(rounds))
	if low == high {
		return text
	}
	dash := "–"
	if strings.HasPrefix(low, "-") {
		dash = " to "
	}
	return text + " (" + low + dash + high + ")"
}

// number writes v with three significant digits at most, or all those before the point.
func number(v float64) string {
	digits := 2
	switch a := math.Abs(v); {
	case a >= 99.95:
		digits = 0
	case a >= 9.995:
		digits = 1
	}
	text := strconv.FormatFloat(v, 'f', digits, 64)
	if digits > 0 {
		text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
	}
	if text == "-0" {
		return "0"
	}
	return text
}

func millis(ns int64) float64 { return float64(ns) / 1e6 }
