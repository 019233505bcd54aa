-- Decides requests of one client at the store, for all gateways at once: rates, requests at once, and a budget.
--
-- KEYS[1] is a hash. Its fields:
--   at                  the time of the last call, in microseconds of this server's clock
--   requests, tokens    GCRA's theoretical arrival time: when the bucket of that limit is full again
--   gateway:NAME        "UNTIL RUNNING TOKENS COST": what that gateway holds, and until when it is believed
-- A gateway that is lost stops to say what it holds, so what it held comes back after its lease.

local at = 0
local function text()
  at = at + 1
  return ARGV[at]
end
local function number()
  return tonumber(text())
end

local name, lease = 'gateway:' .. text(), number()
local limit = {requests = number(), tokens = number()}
local most = {running = number(), tokens = number(), cost = number()}
local saved = {tokens = number(), cost = number()}
local own = {running = number(), tokens = number(), cost = number()}
local returned = {requests = number(), tokens = number()}
local is_unsure = number() == 1
local believed = {requests = number(), tokens = number()}

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local fields = {}
local flat = redis.pcall('HGETALL', KEYS[1])
if flat.err then
  -- Something else wrote a key of this name. It would fail the script, and with it the exchange for all clients.
  redis.call('DEL', KEYS[1])
  flat = {}
end
for index = 1, #flat, 2 do
  fields[flat[index]] = flat[index + 1]
end
-- A clock that was set back: as if no time had passed.
local back = math.max((tonumber(fields.at) or now) - now, 0)

-- What all gateways hold.
local held = {running = own.running, tokens = own.tokens, cost = own.cost}
for field, value in pairs(fields) do
  if string.sub(field, 1, 8) == 'gateway:' and field ~= name then
    local till, running, tokens, cost = string.match(value, '(%S+) (%S+) (%S+) (%S+)')
    till = tonumber(till)
    till = till and till - back
    if not (till and tonumber(running) and tonumber(tokens) and tonumber(cost)) or till < now then
      redis.call('HDEL', KEYS[1], field)
    else
      held.running = held.running + tonumber(running)
      held.tokens = held.tokens + tonumber(tokens)
      held.cost = held.cost + tonumber(cost)
      if back > 0 then
        redis.call('HSET', KEYS[1], field, string.format('%.0f %s %s %s', till, running, tokens, cost))
      end
    end
  end
end

-- When each bucket is full again, and how long one unit takes to come back.
local full, each = {}, {}
for kind, a_minute in pairs(limit) do
  if a_minute > 0 then
    each[kind] = 60000000 / a_minute
    local known = tonumber(fields[kind])
    local till = math.max((known or now) - back, now)
    if is_unsure or not known then
      till = math.max(till, now + (a_minute - believed[kind]) * each[kind])
    end
    full[kind] = math.max(till - returned[kind] * each[kind], now)
  end
end
local function level(kind)
  return limit[kind] - (full[kind] - now) / each[kind]
end
local function lacks(kind, amount)
  return full[kind] and level(kind) + 0.000001 < math.min(math.max(amount, 1), limit[kind])
end
local function exceeds(a_most, value)
  return a_most >= 0 and value > a_most
end

local verdicts = {}
while at < #ARGV do
  local tokens, cost = number(), number()
  local verdict = 'ok'
  if exceeds(most.running, held.running + 1) then
    verdict = 'concurrency'
  elseif lacks('requests', 1) then
    verdict = 'requests'
  elseif lacks('tokens', tokens) then
    verdict = 'tokens'
  elseif exceeds(most.tokens, saved.tokens + held.tokens + tokens)
    or exceeds(most.cost, saved.cost + held.cost + cost) then
    verdict = 'budget'
  else
    for _, sum in ipairs({held, own}) do
      sum.running, sum.tokens, sum.cost = sum.running + 1, sum.tokens + tokens, sum.cost + cost
    end
    for kind, amount in pairs({requests = 1, tokens = tokens}) do
      if full[kind] then
        full[kind] = full[kind] + amount * each[kind]
      end
    end
  end
  verdicts[#verdicts + 1] = verdict
end

local expiry = now
for kind in pairs(limit) do
  if full[kind] then
    redis.call('HSET', KEYS[1], kind, string.format('%.17g', full[kind]))
    expiry = math.max(expiry, full[kind])
  else
    redis.call('HDEL', KEYS[1], kind)
  end
end
if own.running > 0 or own.tokens > 0 or own.cost > 0 then
  local value = string.format('%.0f %.0f %.0f %.0f', now + lease, own.running, own.tokens, own.cost)
  redis.call('HSET', KEYS[1], name, value)
else
  redis.call('HDEL', KEYS[1], name)
end
redis.call('HSET', KEYS[1], 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil((expiry - now + lease) / 1000) + 1000)

local left = {}
for index, kind in ipairs({'requests', 'tokens'}) do
  left[index] = full[kind] and string.format('%.6f', level(kind)) or ''
end
return {left[1], left[2], verdicts}
