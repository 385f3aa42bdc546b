-- Enters a claim, after admit.lua. KEYS[1] mark. ARGV[1] token, ARGV[2] owner or '', ARGV[3] '1' for once, else '0'.
-- Returns what admit returns.
local mark, err = admit(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
return mark or err
