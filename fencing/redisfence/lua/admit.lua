-- Admits a claim to a mark; put before the other scripts. M mark, a hash of token and owner; T token; O owner, '' if
-- not told; once '1': an equal token is stale too. Tokens are decimals in text: a number would lose what is above 2^53.
-- Returns nothing itself. admit returns {1, token, owner}, the mark from now on, if the claim is admitted, and
-- {0, token, owner}, the mark as it stays, if not; or nil and an error's table.
local function admit(M, T, O, once)
  local m = redis.pcall('HMGET', M, 'token', 'owner')
  if m.err then return nil, m end
  local seen, owner = m[1] or '0', m[2] or ''
  if seen ~= '0' and not (#seen <= 19 and string.find(seen, '^[1-9]%d*$')) then
    return nil, redis.error_reply('ERR the mark holds no token')
  end
  if T == seen then
    if once == '1' or O ~= '' and owner ~= '' and O ~= owner then return {0, seen, owner} end
    if O == '' then O = owner end
  elseif #T < #seen or #T == #seen and T < seen then
    return {0, seen, owner}
  end
  local set = redis.pcall('HSET', M, 'token', T, 'owner', O)
  if type(set) == 'table' then return nil, set end
  return {1, T, O}
end
