#include "parts_hook.h"

#include "../../core/hooks/hooks.h"
#include "../support/registrations.h"
#include "part_rules.h"

namespace torchext {

void registerPartRules() {
  PartRules& rules = hooks().parts;
  rules.ruleOf = &ruleOf;
  rules.demandsOf = &demandsByParts;
  rules.copiedArgument = &copiedArgument;
  rules.check = &checkPlan;
  rules.run = &runForParts;
  rules.checkIsExact = &checkIsExact;
  rules.planSteps = &planSteps;
  rules.fillWithSteps = &fillWithSteps;
}

}  // namespace torchext
